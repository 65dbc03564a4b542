"""The doctor: why drafts are not kept, or why it is not faster."""
