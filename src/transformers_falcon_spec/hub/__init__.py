"""The Hugging Face Hub: publishing drafters with a card and figures."""
