"""Every exception of the package. A message says what must hold, what came, and what to do.

```
FalconSpecError
├── DraftTreeError          a tree, or a draft shaped by one, that is not well formed
├── OptionError             an option out of range, unknown, or at odds with another
├── GenerationError         a `generate` call that speculative decoding cannot serve
├── TargetError             a target the loop cannot verify on
├── DrafterMismatchError    a drafter made for another target
├── RankError               processes that decode together lost each other, or differ
├── CheckpointError         weights or files that do not make a whole drafter
├── PatchError              the functions that the package wraps moved, or are not wrapped; `SeamError` is its old name
├── ParityError             a text with a drafter that is not the target's own
├── BenchmarkError          a method that failed in a benchmark which the others finished
│   └── ProcessKilledError  a method whose process was ended by a signal
├── HubError                the Hub cannot be reached, or refuses
├── PublishError            an upload that must not be made, that broke off, or that the Hub refused
├── ConversationError       a training row that cannot be read, with its file and line
└── TrainingError           a training run that cannot start or go on
```
"""


class FalconSpecError(Exception):
    """Base of every exception raised by this package."""


class DraftTreeError(FalconSpecError, ValueError):
    """A draft tree is not well formed."""


class OptionError(FalconSpecError, ValueError):
    """An option is out of range, unknown, or contradicts another one."""


class GenerationError(FalconSpecError, ValueError):
    """A `generate` call asks for something that speculative decoding cannot serve."""


class TargetError(FalconSpecError, RuntimeError):
    """The target cannot be read in the way that verification needs."""


class DrafterMismatchError(FalconSpecError, ValueError):
    """The drafter was made for another target."""


class RankError(FalconSpecError, RuntimeError):
    """Processes that decode together lost each other, or differ in what they must have in common."""


class CheckpointError(FalconSpecError, ValueError):
    """A checkpoint does not hold a whole drafter."""


class PatchError(FalconSpecError, RuntimeError):
    """The functions of Transformers that the package wraps have another signature than expected, or are not wrapped where they must be."""


SeamError = PatchError  # its old name


class ParityError(FalconSpecError, RuntimeError):
    """The text with a drafter is not the target's own, and rounding does not explain it."""


class BenchmarkError(FalconSpecError, RuntimeError):
    """A method raised in the middle of a benchmark; the others were measured."""


class ProcessKilledError(BenchmarkError):
    """A signal ended the process in which a method ran; it must not run in the process that measures the others."""


class HubError(FalconSpecError, OSError):
    """The Hugging Face Hub cannot be reached, or it refuses."""


class PublishError(FalconSpecError, RuntimeError):
    """A publication must not be made, broke off, or was refused by the Hub."""


class ConversationError(FalconSpecError, ValueError):
    """A training row cannot be used; the message names its file and line."""


class TrainingError(FalconSpecError, RuntimeError):
    """A training run cannot start or go on."""
