"""Every exception of the package. A message says what must hold, what came, and what to do."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

_EXTRAS = {  # what `pip install transformers_falcon_spec` does not bring, by the extra that does
    "accelerate": "train",
    "datasets": "train",
    "peft": "train",
    "tensorboard": "train",
    "fastapi": "serve",
    "pydantic": "serve",
    "starlette": "serve",
    "uvicorn": "serve",
    "gguf": "gguf",
}
_MOST_LETTERS = 200  # of an error of others, which may hold the data


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


class CheckpointError(FalconSpecError, ValueError):
    """Files or weights of a drafter are missing or broken."""


class PatchError(FalconSpecError, RuntimeError):
    """The functions of Transformers to wrap have an unexpected signature, or they are not wrapped but must be."""


class ParityError(FalconSpecError, RuntimeError):
    """The text with a drafter is not the target's own, and rounding does not explain it."""


class BenchmarkError(FalconSpecError, RuntimeError):
    """A method raised in the middle of a benchmark; what was measured before is kept."""


class HubError(FalconSpecError, OSError):
    """The Hugging Face Hub cannot be reached, or it refuses."""


class PublishError(FalconSpecError, RuntimeError):
    """A publication must not be made, broke off, or was refused by the Hub."""


class ConversationError(FalconSpecError, ValueError):
    """A training row cannot be used; the message names its file and line."""


class EndpointError(FalconSpecError, OSError):
    """A server that is to answer prompts cannot be reached, does not answer, or refuses."""


class TrainingError(FalconSpecError, RuntimeError):
    """A training run cannot start or go on."""


class RequestError(FalconSpecError, RuntimeError):
    """The server cannot serve a request; `status` is the one of HTTP, and `code` a word for programs."""

    def __init__(self, message: str, status: int = 400, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.status, self.code = status, code


def quoted(names: Iterable[object]) -> str:
    """Names as messages show them."""
    return ", ".join(f"`{name}`" for name in names)


def short(error: BaseException) -> str:
    """What an error of others says, in a line, and not so long that it could hold the data."""
    text = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    return text if len(text) <= _MOST_LETTERS else f"{text[:_MOST_LETTERS]} ..."


@contextmanager
def naming_extras() -> Iterator[None]:
    """Inside, a missing package of an extra is an [`OptionError`] that says what to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        if package not in _EXTRAS:
            raise

        raise OptionError(
            f"This needs the package `{package}`, which is not installed. Run `pip install "
            f'"transformers_falcon_spec[{_EXTRAS[package]}]"`.'
        ) from error
