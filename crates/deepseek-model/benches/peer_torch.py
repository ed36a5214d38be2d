"""The phases of the bench `flash` in PyTorch, for comparison.

A layer of each kind of DeepSeek-V4.1-Flash (16 routed experts, no engram) with random weights, as
PyTorch users would write it: index_select and index_copy_, scaled_dot_product_attention over gathered
keys, grouped matrix products. It is timed between CUDA events, eagerly and in a CUDA graph; a phase is
the sum over its layers, each kind's median times their number. What differs from the decoder: cached
values are not rounded, entries are chosen without candidate blocks (of which these lengths have no
more than are kept), and prompts are of one chunk. Needs nothing but torch.

    python3 peer_torch.py [--json FILE] [--rows 1024,8192] [--decode 1x1024,8x1024] [--tiny] [--cpu]
"""

import argparse
import json
import time

# Of flash-slice.json; a test compares them.
GEOMETRY = {
    "vocab_size": 129280,
    "hidden_size": 5120,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1280,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "moe_intermediate_size": 2304,
    "n_routed_experts": 16,
    "num_experts_per_tok": 6,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "sliding_window": 128,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 512
}
KV_SOURCES = [2, 8, 14, 20]
INDEX_SOURCES = [2, 8, 14, 20, 24, 28, 32, 36]
CUT = 20
EPS = 1e-20
# Rows whose gathered keys are there at a time.
BLOCK = 1024
RUNS = 7

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("--json", metavar="FILE", help="write all figures there")
parser.add_argument("--rows", default="1024,8192", help="rows of prompts [%(default)s]")
parser.add_argument(
    "--decode",
    default="1x1024,8x1024,32x1024,1x32768,8x32768",
    help="sequences x context of decode steps [%(default)s]",
)
parser.add_argument("--tiny", action="store_true", help="small layers, to try the script out")
parser.add_argument("--cpu", action="store_true", help="without a GPU, and without graphs")
args = parser.parse_args()
try:
    import torch
    import torch.nn.functional as F
except ModuleNotFoundError:
    parser.error("needs PyTorch, and finds no module of the name torch")
g = dict(GEOMETRY)
if args.tiny:
    g.update(
        vocab_size=512, hidden_size=64, num_attention_heads=4, head_dim=64, qk_rope_head_dim=16,
        q_lora_rank=32, o_groups=2, o_lora_rank=32, moe_intermediate_size=32, n_routed_experts=8,
        num_experts_per_tok=2, sliding_window=8, index_n_heads=16, index_head_dim=32, index_topk=12,
    )
device = "cpu" if args.cpu else "cuda"
bf16, f32 = torch.bfloat16, torch.float32
h, heads, dim, window = (
    g[k] for k in ("hidden_size", "num_attention_heads", "head_dim", "sliding_window")
)
streams, experts, chosen_experts = g["hc_mult"], g["n_routed_experts"], g["num_experts_per_tok"]
index_heads, index_dim = g["index_n_heads"], g["index_head_dim"]


def ratio(layer):
    return 0 if layer < 2 else 2 if layer < CUT else 1


def kind(layer):
    return ratio(layer), layer in KV_SOURCES, layer in INDEX_SOURCES


def matrix(*shape, dtype=bf16):
    return (torch.randn(shape, device=device) * shape[-1] ** -0.5).to(dtype)


class Layer:
    """Weights of a layer of a kind, and its two halves."""

    def __init__(self, kind):
        self.ratio, self.writes, self.chooses = kind
        m, latent = g["moe_intermediate_size"], g["q_lora_rank"]
        mixes = (2 + streams) * streams
        self.mix = [matrix(mixes, streams * h, dtype=f32) for _ in range(2)]
        self.base = torch.randn(mixes, device=device) * 0.5
        self.wq_a, self.wq_b = matrix(latent, h), matrix(heads * dim, latent)
        self.wkv, self.sink = matrix(dim, h), torch.randn(heads, device=device) * 0.5
        self.wo_a = matrix(g["o_groups"], g["o_lora_rank"], heads * dim // g["o_groups"])
        self.wo_b = matrix(h, g["o_groups"] * g["o_lora_rank"])
        if self.writes:
            self.compress = matrix(2 * dim if self.ratio > 1 else dim, h, dtype=f32)
            self.wk = matrix(index_dim, dim)
        if self.chooses:
            self.index_q, self.index_w = matrix(index_heads * index_dim, latent), matrix(index_heads, h)
        self.gate, self.bias = matrix(experts, h, dtype=f32), torch.randn(experts, device=device) * 0.01
        self.w13, self.w2 = matrix(experts, 2 * m, h), matrix(experts, h, m)
        self.shared13, self.shared2 = matrix(2 * m, h), matrix(h, m)

    def enter(self, x, table):
        """The attention's input and window KV; a source's entries and index keys."""
        normed = norm(collapse(x["streams"], x["pre"]))
        kv = rope(norm(normed @ self.wkv.t()), table)
        if self.writes and normed.shape[0] >= self.ratio:
            pooled = normed.float() @ self.compress.t()
            if self.ratio > 1:
                groups = pooled[: pooled.shape[0] // self.ratio * self.ratio]
                keys, gates = groups.view(-1, self.ratio, 2 * dim).chunk(2, -1)
                pooled = (keys * gates.softmax(1)).sum(1)
            entry = norm(pooled).to(bf16)
            x["entry"], x["key"] = entry, norm(entry @ self.wk.t())
        return normed, kv

    def run(self, x, normed, table, keys):
        """Attention and experts."""
        state = x["streams"]
        pre, post, comb = self.mixed(0, state)
        latent = norm(normed @ self.wq_a.t())
        q = rope((latent @ self.wq_b.t()).view(-1, heads, dim), table)
        if self.chooses:
            keys.choose(
                (latent @ self.index_q.t()).view(-1, index_heads, index_dim), normed @ self.index_w.t()
            )
        out = rope(keys.attend(q, self.sink), table)
        grouped = out.reshape(-1, g["o_groups"], heads * dim // g["o_groups"]).transpose(0, 1)
        out = torch.bmm(grouped, self.wo_a.transpose(1, 2)).transpose(0, 1)
        state = expand(out.reshape(normed.shape[0], -1) @ self.wo_b.t(), state, post, comb)
        ffn_pre, post, comb = self.mixed(1, state)
        state = expand(self.moe(norm(collapse(state, pre))), state, post, comb)
        return dict(x, streams=state, pre=ffn_pre)

    def mixed(self, site, state):
        z = state.flatten(1).float()
        raw = z @ self.mix[site].t() * torch.rsqrt(z.square().mean(1, keepdim=True) + EPS)
        raw = raw * 0.5 + self.base
        pre, post = raw[:, :streams].sigmoid(), 2 * raw[:, streams : 2 * streams].sigmoid()
        comb = raw[:, 2 * streams :].view(-1, streams, streams).softmax(2) + 1e-6
        comb = comb / (comb.sum(1, keepdim=True) + 1e-6)
        for _ in range(g["hc_sinkhorn_iters"] - 1):
            comb = comb / (comb.sum(2, keepdim=True) + 1e-6)
            comb = comb / (comb.sum(1, keepdim=True) + 1e-6)
        return pre + 1e-6, post, comb

    def moe(self, x):
        scores = F.softplus(x.float() @ self.gate.t()).sqrt()
        ids = (scores + self.bias).topk(chosen_experts, 1).indices
        weights = scores.gather(1, ids)
        weights = weights / weights.sum(1, keepdim=True) * g["routed_scaling_factor"]
        order = ids.flatten().argsort()
        counts = (ids.flatten().unsqueeze(0) == torch.arange(experts, device=device)[:, None]).sum(1)
        ends = counts.cumsum(0).to(torch.int32)
        hidden = grouped(x.index_select(0, order // chosen_experts), self.w13, ends)
        results = grouped(swiglu(hidden), self.w2, ends)
        results = torch.empty_like(results).index_copy_(0, order, results)
        results = results.view(-1, chosen_experts, h).float()
        shared = swiglu(x @ self.shared13.t()) @ self.shared2.t()
        return ((results * weights.unsqueeze(2)).sum(1) + shared.float()).to(bf16)


class Keys:
    """What rows attend to: window KV, and entries that an index source chooses.

    Rows are the last `rows` positions of each of some texts of `length` tokens. A prompt is one text.
    """

    def __init__(self, ratio, texts, rows, length):
        self.rows, self.texts, self.ratio = rows, texts, ratio
        first = length - rows
        at = torch.arange(first, length, device=device)
        # A prompt's window KV is all of it, a decode step's what the ring holds.
        self.kept = length if texts == 1 and rows > 1 else min(window, length)
        shift = length - self.kept
        near = at[:, None] - torch.arange(window, device=device)[None] - shift
        base = torch.arange(texts, device=device)[:, None, None]
        self.window = (near.clamp(min=0)[None] + base * self.kept).view(-1, window)
        self.hidden = (near < 0)[None].expand(texts, -1, -1).reshape(-1, window)
        self.kv = torch.randn(texts * self.kept, dim, device=device, dtype=bf16)
        self.choice = None
        if ratio:
            self.entries = length // ratio
            self.pool = torch.randn(texts * self.entries, dim, device=device, dtype=bf16)
            self.index = torch.randn(texts, self.entries, index_dim, device=device, dtype=bf16)
            self.visible = (at + 1) // ratio
            # What layers that choose nothing themselves go by.
            k = min(g["index_topk"], self.entries)
            self.choice = torch.randint(self.entries, (texts * rows, k), device=device)
            self.choice_hidden = torch.zeros_like(self.choice, dtype=torch.bool)

    def choose(self, queries, weights):
        k, number = min(g["index_topk"], self.entries), torch.arange(self.entries, device=device)
        queries = queries.view(self.texts, self.rows, index_heads, index_dim)
        weights = weights.view(self.texts, self.rows, index_heads)
        chosen, hidden = [], []
        for i in range(0, self.rows, BLOCK):
            q = queries[:, i : i + BLOCK]
            n = q.shape[1]
            scores = torch.bmm(q.reshape(self.texts, n * index_heads, index_dim), self.index.mT)
            scores = scores.view(self.texts, n, index_heads, -1).relu()
            scores = torch.einsum("tnhe,tnh->tne", scores, weights[:, i : i + BLOCK]).float()
            unseen = number[None] >= self.visible[i : i + BLOCK, None]
            best = scores.masked_fill(unseen[None], -torch.inf).topk(k, 2)
            chosen.append(best.indices)
            hidden.append(best.values == -torch.inf)
        base = torch.arange(self.texts, device=device)[:, None, None] * self.entries
        self.choice = (torch.cat(chosen, 1) + base).view(-1, k)
        self.choice_hidden = torch.cat(hidden, 1).view(-1, k)

    def attend(self, q, sink):
        outs = []
        for i in range(0, q.shape[0], BLOCK):
            rows = slice(i, i + BLOCK)
            n = q[rows].shape[0]
            keys = [self.kv.index_select(0, self.window[rows].flatten()).view(n, -1, dim)]
            hidden = [self.hidden[rows]]
            if self.choice is not None:
                keys.append(self.pool.index_select(0, self.choice[rows].flatten()).view(n, -1, dim))
                hidden.append(self.choice_hidden[rows])
            # A key of zeros whose score is the sink.
            keys.append(torch.zeros(n, 1, dim, device=device, dtype=bf16))
            keys, hidden = torch.cat(keys, 1).unsqueeze(1), torch.cat(hidden, 1)
            mask = torch.zeros(n, 1, heads, keys.shape[2], device=device, dtype=bf16)
            mask[..., :-1].masked_fill_(hidden[:, None, None], -torch.inf)
            mask[..., -1] = sink.to(bf16)
            values = F.scaled_dot_product_attention(q[rows].unsqueeze(1), keys, keys, attn_mask=mask)
            outs.append(values.squeeze(1))
        return torch.cat(outs)


def norm(x):
    return F.rms_norm(x, (x.shape[-1],), eps=1e-12)


def collapse(state, pre):
    return (state.float() * pre.unsqueeze(2)).sum(1).to(bf16)


def expand(y, state, post, comb):
    old = torch.bmm(comb.transpose(1, 2), state.float())
    return (post.unsqueeze(2) * y.float().unsqueeze(1) + old).to(bf16)


def rope_table(rows):
    angle = torch.rand(rows, g["qk_rope_head_dim"] // 2, device=device) * 6.28
    return angle.cos(), angle.sin()


def rope(x, table):
    cos, sin = (t if x.dim() == 2 else t.unsqueeze(1) for t in table)
    turned = x[..., -2 * cos.shape[-1] :].float()
    a, b = turned[..., 0::2], turned[..., 1::2]
    turned = torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
    return torch.cat([x[..., : -2 * cos.shape[-1]], turned.to(x.dtype)], -1)


def swiglu(hidden):
    limit = g["swiglu_limit"]
    gate, up = hidden.float().chunk(2, -1)
    return (F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)).to(bf16)


def grouped(x, w, ends):
    if device == "cuda" and hasattr(torch, "_grouped_mm"):
        return torch._grouped_mm(x, w.transpose(1, 2), offs=ends)
    begins = [0, *ends.tolist()]
    return torch.cat([x[a:b] @ w[e].t() for e, (a, b) in enumerate(zip(begins, begins[1:]))])


def state_of(rows):
    return dict(
        streams=torch.randn(rows, streams, h, device=device, dtype=bf16),
        pre=torch.rand(rows, streams, device=device),
    )


def median(run):
    """Milliseconds of a run."""
    times = []
    for i in range(RUNS + 2):
        if device == "cpu":
            begun = time.perf_counter()
            run()
            taken = (time.perf_counter() - begun) * 1e3
        else:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            torch.cuda.synchronize()
            taken = begin.elapsed_time(end)
        if i >= 2:
            times.append(taken)
    return sorted(times)[len(times) // 2]


def timed(run):
    """Milliseconds eagerly and in a graph; None where it cannot be captured."""
    eager = median(run)
    if device == "cpu":
        return dict(eager=eager, graph=None)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            run()
        captured = median(graph.replay)
    except RuntimeError as error:
        print("not captured:", str(error).splitlines()[0])
        captured = None
        torch.cuda.synchronize()
    del graph
    torch.cuda.empty_cache()
    return dict(eager=eager, graph=captured)


def halves(texts, rows, length, layers):
    """Time of both halves of the layers, by layer: `rows` of each text enter and run."""
    by_kind = {}
    for of in sorted({kind(layer) for layer in layers}):
        layer, n = Layer(of), texts * rows
        x, table, keys = state_of(n), rope_table(n), Keys(of[0], texts, rows, length)
        normed, _ = layer.enter(dict(x), table)
        by_kind[of] = dict(
            enter=timed(lambda: layer.enter(dict(x), table)),
            run=timed(lambda: layer.run(dict(x), normed, table, keys)),
        )
        del layer, x, keys, normed
    return {layer: by_kind[kind(layer)] for layer in layers}


def add(times):
    """A sum of times, eager and in graphs."""
    times = list(times)
    total = lambda how: None if any(t[how] is None for t in times) else sum(t[how] for t in times)
    return dict(eager=total("eager"), graph=total("graph"))


def head(rows):
    weight, x = matrix(g["vocab_size"], h, dtype=f32), torch.randn(rows, h, device=device)
    return timed(lambda: x @ weight.t())


def moved(rows, kept):
    """Gather of the rows that are kept, and scatter of what comes of them."""
    carried = [*state_of(rows).values(), torch.randn(rows, h, device=device, dtype=bf16)]
    carried.append(torch.zeros(rows, g["index_topk"], device=device, dtype=torch.int32))
    index = torch.arange(rows - kept, rows, device=device)
    result = torch.randn(kept, h, device=device, dtype=bf16)

    def scatter():
        return torch.zeros(rows, h, device=device, dtype=bf16).index_copy_(0, index, result)

    return timed(lambda: [torch.index_select(t, 0, index) for t in carried]), timed(scatter)


def prompt(rows):
    """Phases of a prompt of one chunk, when all rows run and when a window's do."""
    layers = range(g["num_hidden_layers"])
    before, behind = [i for i in layers if i < CUT], [i for i in layers if i > CUT]
    whole, kept = halves(1, rows, rows, layers), min(window, rows)
    tail = halves(1, kept, rows, [CUT, *behind])
    gather, scatter = moved(rows, kept)
    logits, nothing = head(1), dict(eager=0.0, graph=0.0)
    phases = {"encoder layers": add(t for i in before for t in whole[i].values())}
    phases["write KV"] = whole[CUT]["enter"]
    replayed = lambda of: add([of[CUT]["run"], *(t for i in behind for t in of[i].values())])
    off = dict(phases, gather=nothing, scatter=nothing, head=logits)
    off["replay layers"] = replayed(whole)
    kept = dict(phases, gather=gather, scatter=scatter, head=logits)
    kept["replay layers"] = replayed(tail)
    return [dict(rows=rows, policy=p, phases=t) for p, t in (("off", off), ("prompt-tail", kept))]


def decode(batch, context):
    layers = halves(batch, 1, context, range(g["num_hidden_layers"]))
    times = [t for of in layers.values() for t in of.values()] + [head(batch)]
    return dict(batch=batch, context=context, step=add(times))


def show(value):
    return "" if value is None else f"{value:.2f}"


def main():
    name = "cpu" if device == "cpu" else torch.cuda.get_device_name()
    prompts, decodes = [], []
    print(f"PyTorch {torch.__version__} on {name}")
    print("\n| prompt | policy | phase | ms, eager | ms, graph |\n|---|---|---|---|---|")
    for rows in map(int, args.rows.split(",")):
        for line in prompt(rows):
            prompts.append(line)
            total = add(line["phases"].values())
            for phase, t in [*line["phases"].items(), ("all", total)]:
                print(f"| {rows} | {line['policy']} | {phase} | {show(t['eager'])} | {show(t['graph'])} |")
    print("\n| sequences | context | ms a step, eager | ms a step, graph |\n|---|---|---|---|")
    for pair in filter(None, args.decode.split(",")):
        line = decode(*map(int, pair.split("x")))
        decodes.append(line)
        t = line["step"]
        print(f"| {line['batch']} | {line['context']} | {show(t['eager'])} | {show(t['graph'])} |")
    if args.json:
        with open(args.json, "w") as file:
            result = dict(device=name, torch=torch.__version__, prompts=prompts, decode=decodes)
            json.dump(result, file, indent=1)


with torch.no_grad():
    main()
