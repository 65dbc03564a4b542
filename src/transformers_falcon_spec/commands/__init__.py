"""The commands of `falcon-spec`, one file each: a dataclass of options and a `run` that takes it."""
