"""Names that graphs, the file that joins them, and their runners share."""

GENAI = "genai_config.json"
UNKNOWN = "encoder-decoder"  # the type of encoder-decoders in it of which onnxruntime-genai knows none
ROWS, WEIGHTS = "feature_rows", "feature_weights"  # inputs of a tower of tiles: each row is a sum of some features
