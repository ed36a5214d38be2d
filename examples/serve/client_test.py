"""Asks the server as real clients do, many times over, and checks what comes back.

    cargo build --release --example serve
    python -m venv /tmp/clients && /tmp/clients/bin/pip install openai
    /tmp/clients/bin/python examples/serve/client_test.py --server target/release/examples/serve

Random requests from OpenAI's own package and from curl, whole and streamed, in parallel, between them
requests that are wrong and clients that go away. Every answer must be that of the same request asked
alone before; a stream must have a chunk for each token of its usage; and at the end nothing may run,
wait or be held, nor the server have grown.

The server runs under the policy exact without rounding of the cache: then texts depend neither on what
is found in the cache nor on what runs beside them, but for the last bits of sums. Its cache is small, so
that all of it is soon in use: memory that was never written is none that a process has.
"""

import argparse
import collections
import concurrent.futures
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

import openai

# What the allocator keeps grows until about so many requests have come by, with the largest mix of them.
SETTLED = 1000
KEY = "sesame"
MODEL = "demo"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role | upper }}.\n{{ m.content }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT.\n{% endif %}"
)
OPENINGS = [
    "MACBETH.\nTo-morrow, and to-morrow, and",
    "And God said, Let there be",
    "Of man's first disobedience, and the fruit",
    "é ü 漢字 ",
    "The",
    "",
]


def checkpoint(source, to):
    """A copy of a checkpoint, with a chat template."""
    shutil.copytree(source, to)
    path = os.path.join(to, "tokenizer_config.json")
    with open(path, encoding="utf-8") as file:
        config = json.load(file)
    config["chat_template"] = TEMPLATE
    with open(path, "w", encoding="utf-8") as file:
        json.dump(config, file)
    return to


class Server:
    """The server as a process on a free port."""

    def __init__(self, program, model, flags):
        command = [program, "--model", model, "--port", "0", "--served-model-name", MODEL, *flags]
        environment = {**os.environ, "REPLAY_API_KEY": KEY}
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=environment
        )
        line = self.process.stdout.readline()
        self.url = line.removeprefix("listening on ").strip()
        self.port = int(self.url.rsplit(":", 1)[1])

    def metrics(self):
        """Values by name, those with labels by name and labels."""
        with urllib.request.urlopen(self.url + "/metrics") as response:
            lines = response.read().decode().splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    def resident(self):
        """KiB of memory that it holds."""
        with open(f"/proc/{self.process.pid}/status", encoding="utf-8") as file:
            for line in file:
                if line.startswith("VmRSS:"):
                    return int(line.split()[1])
        raise RuntimeError("no VmRSS")

    def idle(self):
        """Waits until nothing runs, waits or is held."""
        names = ["replay_requests_running", "replay_requests_waiting", "replay_kv_pages_used"]
        for _ in range(600):
            metrics = self.metrics()
            if all(metrics[name] == 0 for name in names):
                return metrics
            time.sleep(0.1)
        raise AssertionError(f"not idle after a minute: {[(n, metrics[n]) for n in names]}")

    def end(self):
        """Its exit status after a signal."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


def good_requests(rng, count):
    """Requests that are fine, of many kinds, with whether each is a chat."""
    requests = []
    for _ in range(count):
        body = {"model": MODEL, "max_tokens": rng.randint(1, 16)}
        if rng.random() < 0.7:
            body["temperature"] = 0
        else:
            body["temperature"] = rng.choice([0.5, 1.0])
            body["seed"] = rng.randint(0, 99)
            body["top_p"] = rng.choice([0.9, 1.0])
        if rng.random() < 0.3:
            body["stop"] = rng.choice([["e", "zz"], "the", ["\n"], [" of", ", "]])
        if rng.random() < 0.2:
            body["n"] = rng.randint(2, 3)
        text = rng.choice(OPENINGS)
        # Some begin alike for more pages than the policy computes again.
        if rng.random() < 0.15:
            text = "To be, or not to be, that is the question. " * rng.randint(50, 80) + text
        is_chat = rng.random() < 0.4
        if is_chat:
            body["messages"] = [{"role": "user", "content": text or "Speak."}]
            if rng.random() < 0.3:
                body["messages"].insert(0, {"role": "system", "content": "Be brief."})
            if rng.random() < 0.2:
                body["logprobs"] = True
                body["top_logprobs"] = rng.choice([0, 2, 20])
        else:
            kind = rng.random()
            if kind < 0.1:
                body["prompt"] = [rng.randint(2, 2047) for _ in range(rng.randint(1, 40))]
            elif kind < 0.2:
                body["prompt"] = [text, "Another"]
            else:
                body["prompt"] = text
            if rng.random() < 0.2:
                body["logprobs"] = rng.choice([0, 2, 5])
            if rng.random() < 0.1:
                body["echo"] = True
        requests.append((is_chat, body))
    return requests


BAD = [
    (400, "prompt", {"model": MODEL}),
    (400, "max_tokens", {"model": MODEL, "prompt": "a", "max_tokens": -1}),
    (400, "temperature", {"model": MODEL, "prompt": "a", "temperature": "hot"}),
    (400, "presence_penalty", {"model": MODEL, "prompt": "a", "presence_penalty": 1.5}),
    (400, "logprobs", {"model": MODEL, "prompt": "a", "logprobs": 6}),
    (400, "max_token", {"model": MODEL, "prompt": "a", "max_token": 1}),
    (400, "stop", {"model": MODEL, "prompt": "a", "stop": list("abcde")}),
    (400, "prompt", {"model": MODEL, "prompt": "word " * 5000}),
    (400, "prompt", {"model": MODEL, "prompt": [99999]}),
    (404, "model", {"model": "gpt-4", "prompt": "a"}),
]


def compared(choice, is_chat):
    """Of a choice what must be the same every time."""
    text = choice.message.content if is_chat else choice.text
    return (choice.index, text, choice.finish_reason)


class Client:
    """Asks, and compares with what was answered before."""

    def __init__(self, server):
        self.server = server
        self.api = openai.OpenAI(base_url=server.url + "/v1", api_key=KEY, max_retries=0)
        self.wrong = openai.OpenAI(base_url=server.url + "/v1", api_key="open", max_retries=0)
        self.counts = collections.Counter()
        self.lock = threading.Lock()

    def count(self, *names):
        with self.lock:
            self.counts.update(names)

    def create(self, is_chat, body, **more):
        where = self.api.chat.completions if is_chat else self.api.completions
        return where.create(**body, **more)

    def whole(self, is_chat, body):
        answer = self.create(is_chat, body)
        choices = [compared(choice, is_chat) for choice in answer.choices]
        self.check_logprobs(is_chat, body, answer)
        return choices, (answer.usage.prompt_tokens, answer.usage.completion_tokens)

    def check_logprobs(self, is_chat, body, answer):
        """Each token of an output has one, and no other thing has."""
        if "logprobs" not in body:
            assert all(choice.logprobs is None for choice in answer.choices)
        elif not body.get("echo"):
            told = 0
            for choice in answer.choices:
                logprobs = choice.logprobs
                tokens = logprobs.content if is_chat else logprobs.token_logprobs
                told += len(tokens)
                # An object has the chosen token, too.
                if is_chat:
                    assert all(len(token.top_logprobs) == body["top_logprobs"] for token in tokens)
                elif body["logprobs"] > 0:
                    least = body["logprobs"]
                    assert all(len(top) - least in (0, 1) for top in logprobs.top_logprobs)
            assert told == answer.usage.completion_tokens, (told, answer)

    def streamed(self, is_chat, body):
        texts, finishes, tokens, usage = collections.defaultdict(str), {}, 0, None
        options = {"include_usage": True}
        for chunk in self.create(is_chat, body, stream=True, stream_options=options):
            if chunk.usage is not None:
                assert usage is None and not chunk.choices, chunk
                usage = chunk.usage
            for choice in chunk.choices:
                assert choice.index not in finishes, "a chunk after the end"
                opening = is_chat and choice.delta.role is not None
                text = choice.delta.content or "" if is_chat else choice.text
                texts[choice.index] += text
                if choice.finish_reason is not None:
                    finishes[choice.index] = choice.finish_reason
                elif not opening:
                    tokens += 1
        # A prompt that is echoed is a chunk as well.
        echoes = len(finishes) if body.get("echo") else 0
        assert tokens == usage.completion_tokens + echoes, (tokens, usage, body)
        choices = [(index, texts[index], finishes[index]) for index in sorted(finishes)]
        return choices, (usage.prompt_tokens, usage.completion_tokens)

    def good(self, rng, request, expected):
        how = self.whole if rng.random() < 0.5 else self.streamed
        got = how(*request)
        self.count("good, " + ("whole" if how == self.whole else "streamed"))
        assert got == expected, f"{request}\nexpected {expected}\ngot      {got}"

    def by_curl(self, request, expected):
        is_chat, body = request
        path = "/v1/chat/completions" if is_chat else "/v1/completions"
        command = ["curl", "-sS", self.server.url + path, "-H", f"authorization: Bearer {KEY}"]
        command += ["-H", "content-type: application/json", "-d", "@-"]
        done = subprocess.run(command, input=json.dumps(body), capture_output=True, text=True)
        answer = json.loads(done.stdout)
        choices = [
            (
                choice["index"],
                choice["message"]["content"] if is_chat else choice["text"],
                choice["finish_reason"],
            )
            for choice in answer["choices"]
        ]
        assert choices == expected[0], f"{request}\nexpected {expected[0]}\ngot      {choices}"
        self.count("good, by curl")

    def bad(self, rng):
        if rng.random() < 0.1:
            try:
                self.wrong.models.list()
            except openai.AuthenticationError:
                self.count("bad, 401")
                return
            raise AssertionError("a wrong key was let in")
        status, param, body = rng.choice(BAD)
        stream = {"stream": True} if rng.random() < 0.5 else {}
        try:
            self.api.post("/completions", body={**body, **stream}, cast_to=object)
        except openai.APIStatusError as error:
            assert error.status_code == status and error.param == param, (body, error)
            self.count(f"bad, {status}")
            return
        raise AssertionError(f"taken: {body}")

    def leave_stream(self, rng, request):
        is_chat, body = request
        stream = self.create(is_chat, {**body, "max_tokens": 200, "stop": None}, stream=True)
        for _ in range(rng.randint(0, 5)):
            next(stream, None)
        stream.close()
        self.count("left in a stream")

    def leave_whole(self, rng, request):
        is_chat, body = request
        path = "/v1/chat/completions" if is_chat else "/v1/completions"
        text = json.dumps({**body, "max_tokens": 200, "stop": None}).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nhost: here\r\nauthorization: Bearer {KEY}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(text)}\r\n\r\n"
        )
        whole = head.encode() + text
        with socket.create_connection(("127.0.0.1", self.server.port)) as connection:
            # Some in the middle of their request.
            connection.sendall(whole[: rng.randint(1, len(whole))] if rng.random() < 0.3 else whole)
            time.sleep(rng.random() * 0.02)
        self.count("left without an answer")

    def watch(self):
        with urllib.request.urlopen(self.server.url + "/health") as response:
            assert response.status == 200
        assert [model.id for model in self.api.models.list()] == [MODEL]
        self.count("watched")

    def one(self, number, seed, requests, expected):
        rng = random.Random(f"{seed} {number}")
        at = rng.randrange(len(requests))
        kind = rng.random()
        if kind < 0.62:
            self.good(rng, requests[at], expected[at])
        elif kind < 0.67:
            self.by_curl(requests[at], expected[at])
        elif kind < 0.80:
            self.bad(rng)
        elif kind < 0.90:
            self.leave_stream(rng, requests[at])
        elif kind < 0.97:
            self.leave_whole(rng, requests[at])
        else:
            self.watch()


def run(arguments, server):
    rng = random.Random(arguments.seed)
    client = Client(server)
    requests = good_requests(rng, arguments.kinds)
    expected = [client.whole(*request) for request in requests]
    finishes = collections.Counter(choice[2] for answer in expected for choice in answer[0])
    print(f"{len(requests)} requests asked alone, which ended by {dict(finishes)}")

    sizes, failures, started = {}, [], time.time()
    marks = [arguments.requests * part // 5 for part in range(1, 6)]
    done = 0
    with concurrent.futures.ThreadPoolExecutor(arguments.parallel) as pool:
        for mark in marks:
            tasks = [
                pool.submit(client.one, number, arguments.seed, requests, expected)
                for number in range(done, mark)
            ]
            for task in concurrent.futures.as_completed(tasks):
                if task.exception() is not None:
                    failures.append(task.exception())
                    print(f"failed: {type(task.exception()).__name__}: {task.exception()}")
            done = mark
            metrics = server.idle()
            sizes[mark] = server.resident()
            print(f"after {mark}: idle, {sizes[mark] / 1024:.1f} MiB resident")
    seconds = time.time() - started
    print(f"{arguments.requests} requests in {seconds:.0f} s, {arguments.parallel} at a time:")
    for name, count in sorted(client.counts.items()):
        print(f"  {count:6} {name}")
    for name in sorted(metrics):
        if name.startswith(("replay_texts", "replay_responses", "replay_generated")):
            print(f"  {name} {metrics[name]:.0f}")
    asked, hit = metrics["replay_prompt_tokens_total"], metrics["replay_cached_tokens_total"]
    print(f"  {hit:.0f} of {asked:.0f} prompt tokens were found in the cache")
    first, last = sizes[marks[1]], sizes[marks[-1]]
    if marks[1] < SETTLED:
        print(f"too few requests to tell whether memory grows: {SETTLED} must come before")
    elif last > first * 1.1 + 1024:
        failures.append(f"resident memory went from {first} to {last} KiB")
    return failures


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--server", required=True, help="the program")
    parser.add_argument("--model", default="models/v41-demo", help="a checkpoint [%(default)s]")
    parser.add_argument("--requests", type=int, default=10_000, help="[%(default)s]")
    parser.add_argument("--parallel", type=int, default=16, help="at a time [%(default)s]")
    parser.add_argument("--kinds", type=int, default=120, help="different ones [%(default)s]")
    parser.add_argument("--seed", type=int, default=0, help="[%(default)s]")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = checkpoint(arguments.model, os.path.join(folder, "model"))
        flags = ["--replay", "exact", "--no-activation-rounding", "--cache-tokens", "2000"]
        server = Server(arguments.server, model, flags)
        try:
            failures = run(arguments, server)
            status = server.end()
        finally:
            server.process.kill()
        if status != 0:
            failures.append(f"the server ended with {status}")
    for failure in failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    print(f"{len(failures)} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
