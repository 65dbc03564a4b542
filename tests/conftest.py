"""What every test shares. It must not import the package: the shape checks hook into the first import, which comes later."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read by huggingface_hub when it is imported
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
