"""Every exception of the package. A message says what must hold, what came, and what to do.

```
FalconSpecError
├── DraftTreeError          a draft tree that is not well formed, or a draft with the shape of one
├── OptionError             an option out of range, unknown, or at odds with another
├── GenerationError         a `generate` call that speculative decoding cannot serve
├── TargetError             a target that cannot read draft trees or chains
├── DrafterMismatchError    a drafter made for another target
├── DistributedError        processes that decode together lost each other, or differ; `RankError` is its old name
├── CheckpointError         files or weights of a drafter that are missing or broken
├── PatchError              Transformers has other functions than those to wrap; `SeamError` is its old name
├── ParityError             a text decoded with a drafter that is not the target's own
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
    """The target cannot read draft trees or chains in the way that verification needs."""


class DrafterMismatchError(FalconSpecError, ValueError):
    """The drafter was made for another target."""


class DistributedError(FalconSpecError, RuntimeError):
    """Processes that decode together lost each other, or differ in what they must have in common."""


RankError = DistributedError  # its old name


class CheckpointError(FalconSpecError, ValueError):
    """Files or weights of a drafter are missing or broken."""


class PatchError(FalconSpecError, RuntimeError):
    """The functions of Transformers to wrap have an unexpected signature, or they are not wrapped but must be."""


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
