"""The measurements of `gpu_rows` with PyTorch, for comparison.

Same tensors, row lists, rotation of buffers and medians. A gather is one index_select per input, a
scatter zeros and one index_copy_ per output, both as PyTorch users write them, and both again in a
CUDA graph. `--json FILE` also writes the table as JSON.
"""

import json
import sys

import torch

N_BATCH = 32_768
TAIL = 128
KEPT = [128, 2_560, 8_192]
COLD_BYTES = 160 << 20
RUNS = 31

bf16, f32 = torch.bfloat16, torch.float32


def filled(dtype, dims):
    if dtype.is_floating_point:
        return torch.randn(dims, dtype=dtype, device="cuda")
    return torch.randint(1, 1 << 30, dims, dtype=dtype, device="cuda")


def layer_inputs(n):
    return [
        filled(bf16, (n, 5120)),
        filled(torch.int64, (n,)),
        filled(torch.int32, (n,)),
        filled(f32, (n, 4)),
        filled(f32, (n, 4, 1)),
        filled(f32, (n, 4, 4)),
        filled(bf16, (n, 4, 5120)),
    ]


def layer_outputs(n):
    return [filled(bf16, (n, 5120)), filled(bf16, (n, 4, 5120))]


def size(tensors):
    return sum(t.numel() * t.element_size() for t in tensors)


def kept_rows(n_kept, place):
    n_requests = n_kept // TAIL
    length = N_BATCH // n_requests
    shift = place % (length // TAIL) * TAIL
    rows = [r * length + shift + i for r in range(n_requests) for i in range(TAIL)]
    return torch.tensor(rows, dtype=torch.int64, device="cuda")


def median(n_sets, run):
    times = []
    warm = max(n_sets, 3)
    for i in range(RUNS + warm):
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        run(i % n_sets)
        ended.record()
        torch.cuda.synchronize()
        if i >= warm:
            times.append(begun.elapsed_time(ended) * 1e3)
    return sorted(times)[len(times) // 2]


def in_graph(n_sets, run):
    for i in range(n_sets):
        run(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(n_sets):
            run(i)
    time = median(1, lambda _: graph.replay()) / n_sets
    del graph
    return time


def sets_for(size_once):
    return min(max(-(-COLD_BYTES // size_once), 2), 64)


def copy(size_once):
    n_sets = sets_for(size_once)
    make = lambda: torch.ones(size_once, dtype=torch.uint8, device="cuda")
    buffers = [(make(), make()) for _ in range(n_sets)]
    return in_graph(n_sets, lambda i: buffers[i][1].copy_(buffers[i][0]))


lines = []


def measure(name, rows, read, written, n_sets, run):
    alone = median(n_sets, run)
    graph = in_graph(n_sets, run)
    copied = copy((read + written) // 2)
    lines.append(
        dict(name=name, rows=rows, bytes=read + written, alone_us=alone, graph_us=graph, copy_us=copied)
    )
    torch.cuda.empty_cache()


def gather(n_kept):
    inputs = layer_inputs(N_BATCH)
    once = size(inputs) // N_BATCH * n_kept
    n_sets = sets_for(once)
    lists = [kept_rows(n_kept, i) for i in range(n_sets)]
    outputs = [layer_inputs(n_kept) for _ in range(n_sets)]

    def run(i):
        for source, output in zip(inputs, outputs[i]):
            torch.index_select(source, 0, lists[i], out=output)

    measure("torch gather 7", n_kept, once, once, n_sets, run)


def scatter(n_kept):
    values = [layer_outputs(n_kept) for _ in range(sets_for(size(layer_outputs(n_kept))))]
    read, written = size(values[0]), size(layer_outputs(N_BATCH))
    lists = [kept_rows(n_kept, i) for i in range(len(values))]

    def run(i):
        for value in values[i]:
            batch = torch.zeros((N_BATCH, *value.shape[1:]), dtype=value.dtype, device="cuda")
            batch.index_copy_(0, lists[i], value)

    # In a graph each set would hold a batch of its own: a few are enough.
    del values[4:]
    measure("torch scatter 2", n_kept, read, written, len(values), run)


with torch.no_grad():
    for n_kept in KEPT:
        gather(n_kept)
    for n_kept in KEPT:
        scatter(n_kept)

device = torch.cuda.get_device_name()
print(f"{device}, PyTorch {torch.__version__}")
columns = ["", "rows", "MB r+w", "alone us", "graph us", "TB/s", "copy us", "TB/s", "of copy"]
print("{:<20} {:>6} {:>9} {:>9} {:>9} {:>7} {:>9} {:>7} {:>8}".format(*columns))
for line in lines:
    rate = lambda time: line["bytes"] / time / 1e6
    print(
        "{name:<20} {rows:>6} {mb:>9.1f} {alone_us:>9.1f} {graph_us:>9.1f} {graph_rate:>7.2f} "
        "{copy_us:>9.1f} {copy_rate:>7.2f} {share:>7.0f}%".format(
            mb=line["bytes"] / 1e6,
            graph_rate=rate(line["graph_us"]),
            copy_rate=rate(line["copy_us"]),
            share=100 * line["copy_us"] / line["graph_us"],
            **line,
        )
    )
if "--json" in sys.argv:
    with open(sys.argv[sys.argv.index("--json") + 1], "w") as file:
        json.dump(dict(device=device, torch=torch.__version__, lines=lines), file, indent=1)
