"""The decoding loop, the target as it uses it, and the patch of `generate`. No drafter is known by name here."""
