"""200 requests from 8 clients to the server, some of which leave or ask for what is refused, beside calls of `generate` one by one.

Command: python -m benchmarks.serving
Hardware and time: two CPU cores, about four minutes; resumes behind the load. The server runs on a thread of this process, as `falcon-spec serve` runs it, and the clients,
OpenAI's own, in another process. Then each prompt that was answered is written by a call of its own with the same drafter: the texts must be equal,
and its seconds are those of one by one. The seconds of the server are those of the whole load, what was left and refused included. What is
left behind is counted: requests, threads, connections, hooks and large tensors. Seconds of the processor are kept beside those of the clock: of the server's process, of the
clients', and of one by one. Writes `benchmarks/results/serving.json` (`.jsonl`, while it runs).
"""

import argparse
import gc
import json
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import torch
from transformers import logging

from benchmarks.report import Report, Result, source_line, table, total
from benchmarks.running import same_run
from transformers_falcon_spec.commands.loading import load_drafter, load_target
from transformers_falcon_spec.evaluation.prompts import read_prompts
from transformers_falcon_spec.generation.timed import timed_generate
from transformers_falcon_spec.provenance import provenance
from transformers_falcon_spec.records import Records
from transformers_falcon_spec.serve.engine import Engine, Ticket
from transformers_falcon_spec.serve.service import Server, Service

HERE = Path(__file__).parent
SETS = ("gsm8k", "humaneval", "mt_bench")
NAME = "the-target"
OK = 200
SHARES = {"whole": 0.4, "stream": 0.4, "leave": 0.1, "be refused": 0.1}  # what clients do
SHARE_SAMPLED, SHARE_STOPPED = 0.2, 0.2
LARGE = 4096  # elements of a tensor, such as states and scores; what the tuner learned for a size of batch is smaller
NUM_READ = 2  # chunks, before a client leaves
REFUSED = {
    "max_tokens": (100_000, 400),
    "presence_penalty": (1, 400),
    "model": ("another", 404),
    "temperature": (-1, 400),
}


@dataclass(frozen=True)
class Ask:
    """A request, what its client does (one of `SHARES`), and the status that it must get."""

    body: dict[str, Any]
    does: str
    status: int = OK


def plan(num_requests: int, most_tokens: int) -> list[Ask]:
    """Requests of mixed length: greedy ones, sampled ones with a seed, with stop strings, that are left, and that are refused."""
    rng = random.Random(0)
    prompts = read_prompts([str(HERE / "prompts" / f"{name}.jsonl") for name in SETS])

    asks = []
    for seed in range(num_requests):
        messages = [{"role": role, "content": text} for role, text in rng.choice(prompts).messages]
        body = {"model": NAME, "messages": messages, "max_tokens": rng.randint(2, most_tokens), "temperature": 0}
        if rng.random() < SHARE_SAMPLED:
            body |= {"temperature": 0.8, "top_p": 0.95, "seed": seed}
        if rng.random() < SHARE_STOPPED:
            body["stop"] = ["\n\n", ". "]
        does, status = rng.choices([*SHARES], [*SHARES.values()])[0], OK
        if does == "be refused":
            name = rng.choice(sorted(REFUSED))
            body[name], status = REFUSED[name]
        elif does == "leave":
            body["max_tokens"] = 4 * most_tokens

        asks.append(Ask(body, does, status))

    return asks


def answer(client: openai.OpenAI, ask: Ask) -> dict[str, Any]:
    """What a client gets, and its status."""
    try:
        if ask.does in ("whole", "be refused"):
            found = client.chat.completions.create(**ask.body)
            return {"status": OK, "text": found.choices[0].message.content, "usage": found.usage.to_dict()}

        stream = client.chat.completions.create(**ask.body, stream=True, stream_options={"include_usage": True})
        text, usage = "", None
        for number, chunk in enumerate(stream):
            if ask.does == "leave" and number == NUM_READ:
                stream.close()
                break

            text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
            usage = chunk.usage and chunk.usage.to_dict()
    except openai.APIStatusError as error:
        return {"status": error.status_code}

    return {"status": OK, "text": text, "usage": usage}


def answers(url: str, asks: list[Ask], num_clients: int) -> dict[str, Any]:
    """The answers to all requests, from clients side by side, and the seconds of all of them."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600) as client:
        answer(client, Ask({**asks[0].body, "max_tokens": 2}, "whole"))  # what the first request does once is done
        start, cpu_start = time.perf_counter(), time.process_time()
        with ThreadPoolExecutor(num_clients) as clients:
            found = list(clients.map(lambda ask: answer(client, ask), asks))
        seconds = {"seconds": time.perf_counter() - start, "cpu_seconds_clients": time.process_time() - cpu_start}
        return {"answers": found, **seconds}


@contextmanager
def serving(target: Any, tokenizer: Any, drafter: Any) -> Iterator[Server]:
    """A server on a thread, as `falcon-spec serve` makes it."""
    server = Server(Service(Engine(target, tokenizer, drafter), tokenizer, NAME, {}), "127.0.0.1", 0)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield server
    finally:
        server.should_exit = True
        thread.join()


def left_behind(target: Any) -> dict[str, int]:
    """What there is of things that requests must not leave behind."""
    gc.collect()
    objects = gc.get_objects()
    hooks = sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in target.modules())

    return {
        "num_requests": sum(type(each) is Ticket for each in objects),
        "num_threads": threading.active_count(),
        "num_hooks": hooks,
        "num_tensors": sum(type(each) is torch.Tensor and each.numel() >= LARGE for each in objects),
    }


def load(pair: tuple[Any, Any, Any], args: argparse.Namespace, asks: list[Ask]) -> dict[str, Any]:
    """Put the load on a server; the clients run in a process of their own."""
    command = [sys.executable, "-m", "benchmarks.serving", "--clients", str(args.clients)]
    command += ["--requests", str(args.requests), "--most_tokens", str(args.most_tokens)]
    one_by_one(pair, next(ask for ask in asks if ask.does == "whole"))  # what the first call makes for good
    before, cpu_start = left_behind(pair[0]), time.process_time()

    with serving(*pair) as server:
        asked = [*command, "--ask", server.url]
        said = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
        while server.server_state.connections or server.engine.num_waiting or server.engine.num_writing:
            time.sleep(0.1)  # until the last ones that were left are

    del server
    cpu_seconds, after = time.process_time() - cpu_start, left_behind(pair[0])
    left = {name: after[name] - before[name] for name in after}
    return {**json.loads(said), "cpu_seconds_server": cpu_seconds, "left_behind": left}


def one_by_one(pair: tuple[Any, Any, Any], ask: Ask) -> dict[str, Any]:
    """The text of a request from a call of its own, its tokens and seconds."""
    target, tokenizer, drafter = pair
    body, turns = ask.body, ask.body["messages"]
    ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    sampled = {"do_sample": True, "temperature": body["temperature"], "top_p": body.get("top_p"), "top_k": 0}
    options = sampled if body["temperature"] else {"do_sample": False}
    cpu_start = time.process_time()
    run = timed_generate(target, ids["input_ids"], body["max_tokens"], options, body.get("seed", 0), drafter)
    seconds = {"seconds": run.seconds, "cpu_seconds": time.process_time() - cpu_start}
    text = tokenizer.decode(run.new_ids, skip_special_tokens=True)
    found = [text.index(stop) for stop in body.get("stop", []) if stop in text]
    return {"text": text[: min(found)] if found else text, "num_tokens": len(run.new_ids), **seconds}


def measured(args: argparse.Namespace, file: Records) -> dict[str, Any]:
    """The load, and beside it one by one what was answered."""
    target, tokenizer = load_target(args.target, "float32", "cpu")
    pair = (target, tokenizer, load_drafter(args.drafter, target))
    asks = plan(args.requests, args.most_tokens)
    [served] = file.measured({"load": asks}, lambda them: load(pair, args, them), "load")

    what_was_done = Counter(ask.does for ask in asks)

    whole: list[tuple[Ask, dict[str, Any]]] = []
    num_wrong_status = num_tokens = 0
    for ask, got in zip(asks, served["answers"], strict=True):
        num_wrong_status += ask.status != got["status"]
        if ask.does in ("whole", "stream"):
            whole.append((ask, got))
            num_tokens += got["usage"]["completion_tokens"]

    numbered = {f"request {number}": ask for number, (ask, _) in enumerate(whole)}
    alone = file.measured(numbered, lambda ask: one_by_one(pair, ask), "one by one")

    different = []
    for (ask, got), own in zip(whole, alone, strict=True):
        if got["text"] != own["text"]:
            different.append({"body": ask.body, "served": got["text"], "alone": own["text"]})

    cpu_seconds = {
        "server": served["cpu_seconds_server"],
        "clients": served["cpu_seconds_clients"],
        "one_by_one": total(alone, "cpu_seconds"),
    }
    return {
        "num_clients": args.clients,
        "num_answered": len(whole),
        "num_left": what_was_done["leave"],
        "num_refused": what_was_done["be refused"],
        "num_wrong_status": num_wrong_status,
        "num_identical": len(whole) - len(different),
        "different": different,
        "left_behind": served["left_behind"],
        "num_tokens": num_tokens,
        "seconds": served["seconds"],
        "cpu_seconds": cpu_seconds,
        "tokens_per_second": num_tokens / served["seconds"],
        "tokens_per_second_one_by_one": total(alone, "num_tokens") / total(alone, "seconds"),
    }


def options() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="models/reference-target")
    parser.add_argument("--drafter", default="models/falcon-reference")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--most_tokens", type=int, default=96, help="of an answer")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "serving.json")
    parser.add_argument("--ask", help="be the clients of this server, and print their answers")
    return parser


def main() -> None:
    """Measure, or be the clients."""
    args = options().parse_args()
    logging.set_verbosity_error()
    if args.ask:
        print(json.dumps(answers(args.ask, plan(args.requests, args.most_tokens), args.clients)))
        return

    origin = provenance(seed=0, **{name: str(value) for name, value in vars(args).items() if name != "ask"})
    file = Records(args.output.with_suffix(".jsonl"), same_run(origin))
    row = measured(args, file)
    print(row)
    args.output.write_text(json.dumps({"provenance": origin, "rows": [row]}, indent=1) + "\n", encoding="utf-8")
    file.path.unlink()


def tables(result: Result, path: str) -> list[str]:
    """The load in one line."""
    columns = {
        "clients": "{num_clients}",
        "answered": "{num_answered}",
        "left": "{num_left}",
        "refused": "{num_refused}",
        "the text of a call of its own": "{num_identical}/{num_answered}",
        "served": "{tokens_per_second:.0f} tokens/s",
        "one by one": "{tokens_per_second_one_by_one:.0f} tokens/s",
    }
    lead = (
        "Requests of mixed length with drafter: greedy, sampled with a seed, with stop strings, streamed or whole. The seconds of the server are those "
        "of all requests, left and refused ones included; one by one are calls of `generate` without a server, of what was answered alone."
    )
    return [lead, table(columns, result["rows"]), source_line(result, path)]


REPORT = Report("docs/results.md#serving", ["serving.json"], tables)


if __name__ == "__main__":
    main()
