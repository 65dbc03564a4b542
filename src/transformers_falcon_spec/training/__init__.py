"""Training drafters on the Hugging Face Trainer: conversations, features, glancing, losses."""
