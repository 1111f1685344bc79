"""Readers of models: PyTorch modules, exported programs and ONNX files become a `Graph`."""
