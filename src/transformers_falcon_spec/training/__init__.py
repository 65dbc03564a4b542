"""Training drafters with the Hugging Face Trainer: data, features of the target, objectives, evaluation."""
