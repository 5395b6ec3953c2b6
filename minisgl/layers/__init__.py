"""The layers that models are made of. Not `torch.nn.Module`: `base.BaseOP` is all there is to a layer."""
