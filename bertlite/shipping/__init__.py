"""Models to share: folders for other libraries and the hub, and graphs for onnxruntime and OpenVINO."""
