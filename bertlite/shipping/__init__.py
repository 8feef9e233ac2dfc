"""Models to share: folders that other libraries and the hub read, and graphs for onnxruntime and OpenVINO."""
