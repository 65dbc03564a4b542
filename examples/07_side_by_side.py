"""A page that writes a text twice, with the target alone and with its drafter, and shows the tree of each step as it is drafted.

Command: python examples/07_side_by_side.py
Then open http://127.0.0.1:7860. The texts are written one after the other, since side by side they would share the machine; showing
trees takes a little time, which counts against the drafter. `falcon-spec bench` is what measures.
Hardware and time: two CPU cores; ready in about ten seconds with the pair in `models/`. `--tiny` makes a page of a random pair, asks
it once over HTTP and ends. Needs the extra `demo`; docs/serving.md says more.
"""

import socket
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import gradio as gr
from drawn_tree import STYLE, render_tree
from gradio_client import Client
from pair import PROMPT, Pair, pair_options, read_pair, sampling
from torch import Tensor
from transformers import PreTrainedModel, TextIteratorStreamer

from transformers_falcon_spec.evaluation.steps import Step, StepLog
from transformers_falcon_spec.generation.output import observe_steps
from transformers_falcon_spec.generation.timed import Run, timed_generate

LONGEST = 512  # tokens of an answer
REFRESH_SECONDS = 0.1  # the page is shown anew so often, at most
COLORS = """
.colors { --dim: #595959; --line: var(--border-color-primary); --panel: var(--background-fill-secondary);
  --text: var(--body-text-color); --identical: #1a6b2f; --series-0: #0062a3; }
.dark .colors { --dim: #a8a8a8; --identical: #6fd58a; --series-0: #5cb3f0; }
.colors { overflow-x: auto; }
.colors .tree, .colors .tree * { font-size: var(--text-md); line-height: 1.5; }
.colors .tree li, .colors .tree ul { margin-top: 0; margin-bottom: 0; }
.colors .tree code { background: none; border: none; padding: 0; color: inherit; }
.colors svg { width: 100%; max-width: 28rem; height: auto; }
.colors svg text { font-family: system-ui, sans-serif !important; }
"""
LEGEND = (
    "✓ became text; · did not; + the target's own token. A number is the drafter's chance that the target takes it."
)


class Writing(TextIteratorStreamer):
    """A text that is being written on a thread of its own: iterating shows it as it grows."""

    def __init__(self, pair: Pair, question: str, options: tuple[int, float, int]) -> None:
        super().__init__(pair.tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.pair, self.ids = pair, pair.input_ids(question)
        self.max_new_tokens, self.temperature, self.seed = options
        self.text, self.num_tokens, self.start = "", 0, 0.0
        self.run: Run | None = None  # once it is written

    def put(self, value: Tensor) -> None:
        """Take in the prompt, then the tokens of a step."""
        self.num_tokens += 0 if self.next_tokens_are_prompt else value.numel()
        super().put(value)

    def growing(self, drafter: PreTrainedModel | None = None, log: StepLog | None = None) -> Iterator[None]:
        """Write, and come back whenever it is time to look."""
        self.start = shown = time.perf_counter()
        with ThreadPoolExecutor(max_workers=1) as thread:
            work = thread.submit(self._write, drafter, log)
            work.add_done_callback(lambda _: self.text_queue.put(self.stop_signal))  # also where it failed
            for piece in self:
                self.text += piece
                if time.perf_counter() - shown > REFRESH_SECONDS:
                    shown = time.perf_counter()
                    yield
            self.run = work.result()
        yield

    def _write(self, drafter: PreTrainedModel | None, log: StepLog | None) -> Run:
        with nullcontext() if log is None else observe_steps(log):
            options = (self.max_new_tokens, sampling(self.temperature), self.seed)
            return timed_generate(self.pair.target, self.ids, *options, drafter, streamer=self)

    @property
    def speed(self) -> str:
        """Tokens so far, and what they took."""
        seconds = time.perf_counter() - self.start if self.run is None else self.run.seconds
        return f"**{self.num_tokens / seconds:.1f} tokens/s** · {self.num_tokens} tokens in {seconds:.2f} s"


class SideBySide:
    """The page: its parts, and what happens when the button is pressed."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        with gr.Blocks(analytics_enabled=False, title="Side by side", fill_width=True) as self.blocks:
            gr.Markdown("## The same text in fewer steps\nThe target writes alone, then with its drafter.")
            question = gr.Textbox(PROMPT, label="Prompt", lines=2, elem_id="question")
            with gr.Row():
                length = gr.Slider(8, LONGEST, 128, step=8, label="Most tokens")
                temperature = gr.Slider(0, 1.5, 0, step=0.1, label="Temperature (0 is greedy)")
                seed = gr.Number(0, label="Seed", precision=0, minimum=0)
            button = gr.Button("Write", variant="primary", elem_id="write")
            self.verdict = gr.Markdown(elem_id="verdict")
            with gr.Row():
                self.alone = _column("alone", "The target alone")
                self.drafted = _column("drafted", "With the drafter")
            self.tree_title = gr.Markdown(elem_id="tree-title")
            self.tree = gr.HTML(elem_id="tree", elem_classes="colors")
            self.step = gr.Slider(1, 2, 1, step=1, label="Look at step", visible=False, elem_id="step")
            self.plot = gr.HTML(elem_id="plot", elem_classes="colors")
            self.steps = gr.State([])
            tree, shown = [self.tree_title, self.tree], [self.verdict, self.step, self.plot, self.steps]
            button.click(
                self.write,
                [question, length, temperature, seed],
                [*self.alone, *self.drafted, *tree, *shown],
                api_name="write",
                concurrency_limit=1,  # one text at a time; others wait, and see their place in the queue
                show_progress="hidden",
            )
            self.step.input(_tree_at, [self.steps, self.step], tree, api_name=False, show_progress="hidden")

    def write(self, question: str, length: float, temperature: float, seed: float) -> Iterator[dict[Any, Any]]:
        """Fill the page while both texts grow."""
        refusal = self.pair.refusal(question, int(length)) if question.strip() else "There must be a prompt."
        if refusal is not None:
            raise gr.Error(refusal)
        options = (int(length), temperature, int(seed))
        log, tree = StepLog(self.pair.tokenizer), (self.tree_title, self.tree)
        alone, drafted = (Writing(self.pair, question, options) for _ in range(2))
        blank = dict.fromkeys([*self.drafted, *tree, self.plot], "")
        yield {**blank, self.step: gr.update(visible=False), self.verdict: "Writing with the target alone …"}
        for _ in alone.growing():
            yield dict(zip(self.alone, (alone.text, alone.speed), strict=True))
        yield {self.verdict: "Writing with the drafter …"}
        for _ in drafted.growing(self.pair.drafter, log):
            texts = dict(zip(self.drafted, (drafted.text, drafted.speed), strict=True))
            yield texts | dict(zip(tree, _tree_at(log.steps, len(log.steps)), strict=True))
        yield {
            self.verdict: _verdict(alone.run, drafted.run),
            self.step: gr.update(maximum=len(log.steps), value=len(log.steps), visible=len(log.steps) > 1),
            self.plot: _plot(drafted.run),
            self.steps: log.steps,
        }


def _column(name: str, title: str) -> tuple[gr.Textbox, gr.Markdown]:
    with gr.Column():
        return gr.Textbox(label=title, lines=5, elem_id=name), gr.Markdown(elem_id=f"{name}-speed")


def _tree_at(steps: Sequence[Step], number: float) -> tuple[str, str]:
    """Title and tree of a step, by its number from 1 on."""
    if not steps:
        return "", ""
    step = steps[int(number) - 1]
    kept = f"{step.num_accepted} of {step.num_drafted} drafted tokens kept" if step.num_drafted else "nothing drafted"
    return f"### Step {int(number)}: {kept}\n{LEGEND}", render_tree(step)


def _verdict(alone: Run, drafted: Run) -> str:
    stats = drafted.output.speculation
    pairs = zip(alone.new_ids, drafted.new_ids, strict=False)
    equal = next((place for place, (one, other) in enumerate(pairs) if one != other), None)
    if alone.new_ids == drafted.new_ids:
        said = "the same text"
    else:
        said = (
            f"another text from token {min(len(alone.new_ids), len(drafted.new_ids)) if equal is None else equal} on"
        )
    steps = f"{stats.num_tokens} tokens in {stats.num_steps} steps, acceptance length {stats.acceptance_length:.2f}"
    return f"### {alone.seconds / drafted.seconds:.2f}x as fast, {said}\nWith the drafter: {steps}."


def _plot(run: Run) -> str:
    """Bars of the share of drafted tokens that were kept, depth by depth."""
    shares = run.output.speculation.acceptance_by_depth
    if not any(shares):
        return ""

    bars = []
    for depth, share in enumerate(shares, start=1):
        left = 40 * depth
        top = 110 - 90 * share
        bars.append(f'<rect x="{left}" y="{top:.1f}" width="24" height="{90 * share:.1f}" fill="var(--series-0)"/>')
        bars.append(f'<text x="{left}" y="{top - 4:.1f}" fill="var(--text)" font-size="12">{share:.2f}</text>')
        bars.append(f'<text x="{left + 8}" y="126" fill="var(--text)" font-size="12">{depth}</text>')
    width = 40 * (len(shares) + 1)
    return f'<h3>Acceptance by depth</h3><svg viewBox="0 0 {width} 130" role="img">{"".join(bars)}</svg>'


def main() -> None:
    """Show the page until interrupted."""
    parser = pair_options(__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=7860, help="0 takes a free one")
    args = parser.parse_args()
    pair = read_pair(args)
    for drafter in (None, pair.drafter):  # what the first call does once is done before anybody asks
        timed_generate(pair.target, pair.input_ids("Hello."), 8, sampling(0), 0, drafter)
    blocks = SideBySide(pair).blocks
    if args.tiny or not args.port:
        with socket.create_server((args.host, 0)) as found:
            args.port = found.getsockname()[1]
    _, url, _ = blocks.launch(
        server_name=args.host,
        server_port=args.port,
        css=COLORS + STYLE,
        footer_links=[],
        prevent_thread_lock=True,
    )
    if args.tiny:
        print(Client(url, verbose=False).predict("What is 3 plus 4?", 16, 0, 0, api_name="/write"))
        blocks.close()
        return
    blocks.block_thread()


if __name__ == "__main__":
    main()
