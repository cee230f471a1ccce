"""A prepared model and a strategy as an ONNX graph with its contract."""
