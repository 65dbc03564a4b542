"""How much to draft: what steps cost and bring is measured while text is written."""
