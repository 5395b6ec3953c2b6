"""The Triton backend runs on the GPU, or, without one, in Triton's interpreter. Decorated functions read the variable when imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    from tests.tools.triton_interpreter import install

    install()
