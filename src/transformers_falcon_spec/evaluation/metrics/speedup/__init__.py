"""How much faster a text is written."""
