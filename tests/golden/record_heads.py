"""Records what heads that draft compute for the tiny models, one file a head, beside this script.

Run from the repository's root, in any Python with torch and transformers: python -m tests.golden.record_heads
[NAME ...]

The arithmetic is that of the published models: an entry of a head is made from a token and the model's state
at the token before. The layer itself is transformers'. An entry of zeros stands for the first token, which
has no token before; published implementations begin with the second token instead.

A file holds, for prompt i of `lengths`: `tokens_i` int32[length + 1], the prompt and the model's next token,
`logits_i` float32[length, vocab], the head's at every token but the first, and `drafts_i` int32[4], its
greedy drafts after the last token.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from tests.golden import heads
from tests.golden.record import MARGIN, Oracle
from tests.golden.variants import VARIANTS
from tests.golden.weights import uniform

LENGTHS = (1, 17, 63, 70)
DRAFTS = 4
EAGLE = "llama_gqa"  # the model of the EAGLE-3 heads
NAMES = (*heads.MTP, "eagle3", "eagle3_speculators")

# entries' tokens [n], states before them [n - 1, size] -> results [n, hidden]
Layer = Callable[[list[int], Tensor], Tensor]


class Mtp:
    """A head beside the last layer of a model that has a layer more, whose input it replaces."""

    def __init__(self, variant: str) -> None:
        config = heads.mtp_config(variant)
        found = {name: torch.tensor(x) for name, x in heads.mtp_weights(variant, config).items()}
        count = config["num_hidden_layers"]
        if variant == "mimo":
            head, inner = "model.mtp_layers.0.", "model.mtp_layers.0."
            names = "token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"
        elif variant.startswith("qwen3"):
            head, inner = "mtp.", "mtp.layers.0."
            names = "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"
        else:
            head = inner = f"model.layers.{count}."
            names = "enorm", "hnorm", "eh_proj", "shared_head.norm"
        self.embedding_norm, self.hidden_norm, self.joined, self.norm = (
            found.pop(f"{head}{name}.weight") for name in names
        )
        renamed = {
            name.replace(inner, f"model.layers.{count}.") if name.startswith(inner) else name: x
            for name, x in found.items()
            if not name.endswith(("shared_head.head.weight", f"{count}.embed_tokens.weight"))
        }
        kinds = [*config["layer_types"], "full_attention"] if "layer_types" in config else None
        longer = {**config, "num_hidden_layers": count + 1, **({"layer_types": kinds} if kinds else {})}
        self.model = _loaded(variant, longer, renamed)
        self.hidden_first, self.feeds_norm = variant == "mimo", variant.startswith(("mimo", "qwen3"))
        self.one, self.eps = float(variant.startswith("qwen3")), config.get("rms_norm_eps", 1e-6)
        self.embedding = found["model.embed_tokens.weight"]
        self.head = found.get("lm_head.weight", self.embedding)

    def states(self, oracle: Oracle, tokens: list[int]) -> Tensor:
        """Of the model without the head, after its last norm."""
        return oracle.model.model(torch.tensor([tokens]), use_cache=False).last_hidden_state[0]

    def layer(self, tokens: list[int], before: Tensor) -> Tensor:
        embedded = _norm(self.embedding[tokens[1:]], self.embedding_norm + self.one, self.eps)
        hidden = _norm(before, self.hidden_norm + self.one, self.eps)
        both = torch.cat([hidden, embedded] if self.hidden_first else [embedded, hidden], -1)
        x = torch.cat([torch.zeros(1, both.shape[1] // 2), both @ self.joined.T])
        out = list[Any]()

        def enter(module: Any, args: Any, kwargs: Any) -> Any:
            return (x[None], *args[1:]), kwargs

        last = self.model.model.layers[-1]
        hooks = [
            last.register_forward_pre_hook(enter, with_kwargs=True),
            last.register_forward_hook(lambda module, args, result: out.append(result)),
        ]
        self.model(torch.tensor([tokens]), use_cache=False)
        for hook in hooks:
            hook.remove()
        (result,) = out
        return (result[0] if isinstance(result, tuple) else result)[0]

    def results(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Logits by the model's tokens, and states for the next entry."""
        normed = _norm(x, self.norm + self.one, self.eps)
        return normed @ self.head.T, normed if self.feeds_norm else x


class Eagle3:
    """A head with a layer of its own."""

    def __init__(self, speculators: bool) -> None:
        config = heads.eagle3_config(EAGLE, speculators)
        found = heads.eagle3_weights(EAGLE, config)
        name = "layers.0." if speculators else "midlayer."
        self.own = {key.removeprefix(name): torch.tensor(x) for key, x in found.items()}
        self.config, self.normed_first = config.get("transformer_layer_config", config), speculators
        self.before = config["eagle_aux_hidden_state_layer_ids"]
        model = heads.weights(EAGLE)
        self.embedding = self.own.get("embed_tokens.weight", torch.tensor(model["model.embed_tokens.weight"]))

    def states(self, oracle: Oracle, tokens: list[int]) -> Tensor:
        entered = list[Tensor]()
        layers = oracle.model.model.layers
        hooks = [
            layer.register_forward_pre_hook(
                lambda module, args, kwargs: entered.append(args[0] if args else kwargs["hidden_states"]),
                with_kwargs=True,
            )
            for layer in layers
        ]
        ends = layers[-1].register_forward_hook(
            lambda module, args, out: entered.append(out[0] if isinstance(out, tuple) else out)
        )
        oracle.model(torch.tensor([tokens]), use_cache=False)
        for hook in (*hooks, ends):
            hook.remove()
        return torch.cat([entered[i][0] for i in self.before], -1) @ self.own["fc.weight"].T

    def layer(self, tokens: list[int], before: Tensor) -> Tensor:
        own, eps, dim = self.own, self.config["rms_norm_eps"], self.config["hidden_size"]
        heads_, kv_heads = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        size, n = dim // heads_, len(tokens)
        state = _norm(before, own["hidden_norm.weight"], eps)
        embedded = _norm(self.embedding[tokens[1:]], own["input_layernorm.weight"], eps)
        both = torch.cat([torch.zeros(1, 2 * dim), torch.cat([embedded, state], -1)])
        x = torch.cat([torch.zeros(1, dim), state if self.normed_first else before])
        angles = torch.arange(n)[:, None] * self.config["rope_theta"] ** (-torch.arange(0, size, 2) / size)
        cos, sin = (f(torch.cat([angles, angles], -1))[:, None] for f in (torch.cos, torch.sin))

        def turned(part: str, count: int) -> Tensor:
            y = (both @ own[f"self_attn.{part}_proj.weight"].T).reshape(n, count, size)
            half = torch.cat([-y[..., size // 2 :], y[..., : size // 2]], -1)
            return y * cos + half * sin

        q, k = turned("q", heads_), turned("k", kv_heads)
        v = (both @ own["self_attn.v_proj.weight"].T).reshape(n, kv_heads, size)
        k, v = (y.repeat_interleave(heads_ // kv_heads, 1) for y in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * size**-0.5
        scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf)
        y = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(n, -1)
        x = x + y @ own["self_attn.o_proj.weight"].T
        y = _norm(x, own["post_attention_layernorm.weight"], eps)
        gate = torch.nn.functional.silu(y @ own["mlp.gate_proj.weight"].T)
        return x + (gate * (y @ own["mlp.up_proj.weight"].T)) @ own["mlp.down_proj.weight"].T

    def results(self, x: Tensor) -> tuple[Tensor, Tensor]:
        normed = _norm(x, self.own["norm.weight"], self.config["rms_norm_eps"])
        logits = torch.full((len(x), self.config["vocab_size"]), -torch.inf)
        ids = torch.arange(len(self.own["d2t"])) + self.own["d2t"]
        logits[:, ids] = normed @ self.own["lm_head.weight"].T
        return logits, x


def _loaded(variant: str, config: dict[str, Any], tensors: dict[str, Tensor]) -> Any:
    from safetensors.torch import save_file

    from tests.golden.record import SAME

    with tempfile.TemporaryDirectory() as folder:
        kind = config["model_type"]
        (Path(folder) / "config.json").write_text(json.dumps({**config, "model_type": SAME.get(kind, kind)}))
        save_file(tensors, Path(folder) / "model.safetensors", metadata={"format": "pt"})
        how = {"attn_implementation": "eager", "experts_implementation": "eager", "dtype": torch.float32}
        return transformers.AutoModelForCausalLM.from_pretrained(folder, **how)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def record(name: str) -> dict[str, np.ndarray]:
    eagle = name.startswith("eagle3")
    variant = EAGLE if eagle else name
    head: Any = Eagle3(name.endswith("speculators")) if eagle else Mtp(variant)
    oracle, vocab = Oracle(variant), VARIANTS[variant]["vocab_size"]
    out, margins = {"lengths": np.array(LENGTHS, np.int32)}, list[float]()
    for i, length in enumerate(LENGTHS):
        for attempt in range(100):
            noise = uniform(f"{name}/head/{length}/{attempt}", length)
            prompt = [int(x) for x in (noise / np.sqrt(12.0) + 0.5) * vocab]
            tokens = [*prompt, int(oracle.logits(prompt)[-1].argmax())]
            before, drafts, logits = head.states(oracle, prompt), list[int](), None
            least = np.inf
            for _ in range(DRAFTS):
                found, following = head.results(head.layer([*tokens, *drafts], before))
                logits = found if logits is None else logits
                second, best = found[-1].sort().values[-2:]
                least = min(least, float(best - second))
                drafts.append(int(found[-1].argmax()))
                before = torch.cat([before, following[-1:]])
            if least > MARGIN:
                break
        else:
            raise SystemExit(f"{name}: no prompt of {length} tokens has margins above {MARGIN}")
        margins.append(least)
        assert logits is not None
        out |= {
            f"tokens_{i}": np.array(tokens, np.int32),
            f"logits_{i}": logits[1:].numpy(),
            f"drafts_{i}": np.array(drafts, np.int32),
        }
    return {**out, "smallest_margin": np.array(min(margins))}


if __name__ == "__main__":
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    for name in sys.argv[1:] or NAMES:
        with torch.no_grad():
            arrays = record(name)
        path = Path(__file__).parent / f"head_{name}.npz"
        np.savez_compressed(path, **arrays)
        print(f"{name}: {path.stat().st_size} bytes, smallest margin {arrays['smallest_margin']:.4f}")
