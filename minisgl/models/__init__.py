"""Model directories: their configuration, their weights, and the decoder that computes them. Import from the modules: loading a
configuration must not cost an import of torch's model code."""
