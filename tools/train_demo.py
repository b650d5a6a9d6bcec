"""Train the demo model that ships in `jengine/demo`: a small Llama that writes Python.

The text is the standard library (PSF-2.0) of the Python that runs this script. It is cut into pieces: a
function, a dedented method, a short class, or several module-level statements. Each piece becomes `<s> piece
</s>`, so the model learns to stop.

Muon updates the matrices, and Adam the other weights. Training ends after `--minutes`, so two runs produce
similar weights, but not the same. Files written:

    DIR/model.safetensors  config.json  tokenizer.json  tokenizer_config.json  generation_config.json
    DIR/training.json      the record: loss curve, held-out perplexity, training data
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import math
import platform
import sysconfig
import textwrap
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
from safetensors.numpy import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from tqdm import tqdm

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 3072,
    "hidden_size": 256,
    "intermediate_size": 640,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "dtype": "bfloat16",
}
SKIP = {
    "test", "tests", "idle_test", "site-packages", "lib2to3", "pydoc_data", "encodings", "ensurepip",
    "turtledemo", "__pycache__",
}  # fmt: skip
HELD_OUT = 50  # one file in this many is held out
BATCH_TOKENS = 4096


# --- text ---------------------------------------------------------------------------------------


def pieces(source: str) -> list[str]:
    """Cut a module into pieces of at most a few thousand characters; each is valid Python on its own."""
    lines = source.splitlines()
    out: list[str] = []
    run: list[str] = []

    def text_of(node: ast.stmt) -> str:
        start = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))]) - 1
        while start > 0 and lines[start - 1].strip().startswith("#"):
            start -= 1
        return textwrap.dedent("\n".join(lines[start : node.end_lineno]))

    def flush() -> None:
        if run:
            out.append("\n".join(run))
            run.clear()

    for node in ast.parse(source).body:
        text = text_of(node)
        if isinstance(node, ast.ClassDef) and len(text) > 2400:
            flush()
            out += [text_of(n) for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
        elif isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            flush()
            out.append(text)
        else:
            run.append(text)
            if sum(map(len, run)) > 1200:
                flush()
    flush()

    def wanted(piece: str) -> bool:
        words = sum(c.isalpha() or c.isspace() for c in piece)
        if not 40 <= len(piece) <= 6000 or words < 0.6 * len(piece):  # excludes tables of data
            return False
        try:
            ast.parse(piece)
        except SyntaxError:
            return False
        return True

    return [p for p in (p.strip("\n") + "\n" for p in out) if wanted(p)]


def read_corpus() -> tuple[list[str], list[str]]:
    """Pieces of the standard library for training, and pieces of other files of it for evaluation."""
    root = Path(sysconfig.get_path("stdlib"))
    train: list[str] = []
    held: list[str] = []
    seen: set[str] = set()
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if SKIP & set(path.relative_to(root).parts):
            continue
        try:
            cut = pieces(path.read_text("utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        fresh = [p for p in cut if p not in seen]
        seen.update(fresh)
        is_held = int(hashlib.sha256(name.encode()).hexdigest(), 16) % HELD_OUT == 0
        (held if is_held else train).extend(fresh)
    return train, held


def train_tokenizer(texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    # An indent is one token, because a newline and the spaces after it are one word.
    words = Regex(r"""\n[ ]*| ?[A-Za-z]+| ?_+| ?[0-9]{1,3}| ?[^\sA-Za-z0-9_]+|\s+""")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(words, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=CONFIG["vocab_size"],
            special_tokens=["<s>", "</s>", "<pad>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 0)]
    )
    return tokenizer


def as_stream(tokenizer: Tokenizer, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """The token ids of all pieces, concatenated, and the index of each token's piece."""
    encoded = [[*e.ids, CONFIG["eos_token_id"]] for e in tokenizer.encode_batch(texts)]
    piece = np.repeat(np.arange(len(encoded), dtype=np.int32), [len(e) for e in encoded])
    return np.concatenate([np.asarray(e, np.int32) for e in encoded]), piece


# --- model --------------------------------------------------------------------------------------


def init(key: jax.Array) -> dict:
    h, f, d = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["head_dim"]
    q, kv = CONFIG["num_attention_heads"] * d, CONFIG["num_key_value_heads"] * d
    shapes = {
        "q_proj": (q, h),
        "k_proj": (kv, h),
        "v_proj": (kv, h),
        "o_proj": (h, q),
        "gate_proj": (f, h),
        "up_proj": (f, h),
        "down_proj": (h, f),
    }
    layers = []
    for i in range(CONFIG["num_hidden_layers"]):
        keys = jax.random.split(jax.random.fold_in(key, i), len(shapes))
        layer = {
            n: jax.random.normal(k, s) / math.sqrt(s[1])
            for k, (n, s) in zip(keys, shapes.items(), strict=True)
        }
        layer |= {n: layer[n] * 0.1 for n in ("o_proj", "down_proj")}
        layers.append({"matrices": layer, "norms": {"attn": jnp.ones(h), "mlp": jnp.ones(h)}})
    embed = jax.random.normal(jax.random.fold_in(key, 99), (CONFIG["vocab_size"], h)) * 0.05
    return {"embed": embed, "layers": layers, "norm": jnp.ones(h)}


def norm(x: jax.Array, weight: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + CONFIG["rms_norm_eps"]) * weight


def rotate(x: jax.Array) -> jax.Array:
    """Rotary embedding of x [batch, tokens, heads, head_dim], positions from zero."""
    d = x.shape[-1]
    angle = jnp.arange(x.shape[1])[:, None] / CONFIG["rope_theta"] ** (jnp.arange(0, d, 2) / d)
    cos, sin = (jnp.concatenate([f(angle)] * 2, -1)[None, :, None] for f in (jnp.cos, jnp.sin))
    a, b = jnp.split(x, 2, -1)
    return x * cos + jnp.concatenate([-b, a], -1) * sin


def losses(params: dict, ids: jax.Array, piece: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The sum and the number of next-token losses over ids [batch, tokens + 1]. Attention stays within a
    piece.
    """
    heads, kv, d = CONFIG["num_attention_heads"], CONFIG["num_key_value_heads"], CONFIG["head_dim"]
    x = params["embed"][ids[:, :-1]]
    b, t, _ = x.shape
    own = piece[:, :-1]
    visible = (own[:, :, None] == own[:, None, :]) & jnp.tril(jnp.ones((t, t), bool))
    bias = jnp.where(visible, 0.0, -1e9)[:, None, None]
    for layer in params["layers"]:
        w, n = layer["matrices"], layer["norms"]
        y = norm(x, n["attn"])
        q = rotate((y @ w["q_proj"].T).reshape(b, t, heads, d)).reshape(b, t, kv, heads // kv, d)
        k = rotate((y @ w["k_proj"].T).reshape(b, t, kv, d))
        v = (y @ w["v_proj"].T).reshape(b, t, kv, d)
        p = jax.nn.softmax(jnp.einsum("btkgd,bskd->bkgts", q, k) / math.sqrt(d) + bias, -1)
        x = x + jnp.einsum("bkgts,bskd->btkgd", p, v).reshape(b, t, -1) @ w["o_proj"].T
        y = norm(x, n["mlp"])
        x = x + (jax.nn.silu(y @ w["gate_proj"].T) * (y @ w["up_proj"].T)) @ w["down_proj"].T
    logits = norm(x, params["norm"]) @ params["embed"].T
    counted = own == piece[:, 1:]  # the token after </s> belongs to another piece
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:])
    return jnp.sum(nll * counted), jnp.sum(counted)


# --- training -----------------------------------------------------------------------------------


def schedule(progress: float) -> float:
    """Learning rate factor: a short warmup, a plateau, then linear decay to zero over the last 60 %."""
    return min(progress / 0.01, 1.0, (1.0 - progress) / 0.6 + 1e-3)


def train(params: dict, stream: np.ndarray, piece: np.ndarray, minutes: float) -> tuple[dict, list]:
    labels = jax.tree_util.tree_map_with_path(
        lambda path, _: "muon" if "matrices" in str(path) else "adam", params
    )
    optimiser = optax.partition(
        {
            "muon": optax.contrib.muon(0.02, weight_decay=0.01),
            "adam": optax.adam(0.004, b1=0.9, b2=0.95),
        },
        labels,
    )

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, ids, own, factor):
        def mean(p):
            total, count = losses(p, ids, own)
            return total / count

        loss, grads = jax.value_and_grad(mean)(params)
        updates, state = optimiser.update(grads, state, params)
        return optax.apply_updates(params, jax.tree.map(lambda u: u * factor, updates)), state, loss

    state = jax.jit(optimiser.init)(params)
    rng = np.random.default_rng(0)
    curve: list = []
    start, done, seen, recent = time.monotonic(), 0.0, 0, []
    with tqdm(total=round(minutes * 60), unit="s") as bar:
        while done < 1.0:
            length = 256 if done < 0.8 else 1024  # short contexts first, then long ones
            at = rng.integers(0, len(stream) - length - 1, BATCH_TOKENS // length)[:, None] + np.arange(
                length + 1
            )
            params, state, loss = step(params, state, stream[at], piece[at], jnp.float32(schedule(done)))
            recent.append(float(loss))
            seen += BATCH_TOKENS
            done = (time.monotonic() - start) / (minutes * 60)
            if len(recent) == 20:
                curve.append([seen, round(sum(recent) / 20, 4)])
                recent.clear()
                bar.set_postfix(tokens=f"{seen / 1e6:.2f}M", loss=curve[-1][1])
                bar.update(min(round(done * minutes * 60), bar.total) - bar.n)
    return params, curve


def held_out(params: dict, stream: np.ndarray, piece: np.ndarray) -> float:
    """The mean loss per token, in nats, over windows of the full context."""
    length = CONFIG["max_position_embeddings"]
    count = (len(stream) - 1) // length
    run = jax.jit(losses)
    parts = [
        run(params, *(x[None, i * length : (i + 1) * length + 1] for x in (stream, piece)))
        for i in range(count)
    ]
    return float(sum(p[0] for p in parts) / sum(p[1] for p in parts))


def named(params: dict) -> dict[str, jax.Array]:
    """The weights by their names in Hugging Face's Llama."""
    out = {"model.embed_tokens.weight": params["embed"], "model.norm.weight": params["norm"]}
    for i, layer in enumerate(params["layers"]):
        for name, weight in layer["matrices"].items():
            block = "self_attn" if name[0] in "qkvo" else "mlp"
            out[f"model.layers.{i}.{block}.{name}.weight"] = weight
        out[f"model.layers.{i}.input_layernorm.weight"] = layer["norms"]["attn"]
        out[f"model.layers.{i}.post_attention_layernorm.weight"] = layer["norms"]["mlp"]
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=75)
    parser.add_argument("--out", type=Path, default=Path("jengine/demo"))
    args = parser.parse_args()

    texts, held_texts = read_corpus()
    tokenizer = train_tokenizer(texts)
    stream, piece = as_stream(tokenizer, texts)
    held_stream, held_piece = as_stream(tokenizer, held_texts)
    held_bytes = sum(len(t.encode()) for t in held_texts)
    print(f"{len(texts)} pieces, {len(stream) / 1e6:.2f}M tokens for training; {len(held_stream)} held out")

    params = init(jax.random.key(0))
    count = sum(x.size for x in jax.tree.leaves(params))
    params, curve = train(params, stream, piece, args.minutes)
    bf16 = jax.tree.map(lambda x: np.asarray(x).astype(ml_dtypes.bfloat16), params)
    loss = held_out(jax.tree.map(lambda x: x.astype(np.float32), bf16), held_stream, held_piece)

    args.out.mkdir(parents=True, exist_ok=True)
    save_file(named(bf16), args.out / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(args.out / "tokenizer.json"))
    generation = {"bos_token_id": 0, "eos_token_id": 1, "temperature": 0.8, "top_p": 0.95}
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "model_max_length": CONFIG["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
    }
    record = {
        "text": f"the standard library of Python {platform.python_version()}, licence PSF-2.0",
        "parameters": count,
        "pieces": len(texts),
        "unique_tokens": len(stream),
        "minutes": args.minutes,
        "held_out": {
            "tokens": len(held_stream),
            "perplexity": round(math.exp(loss), 3),
            "bits_per_byte": round(loss / math.log(2) * len(held_stream) / held_bytes, 4),
        },
        "loss_curve": {"columns": ["tokens seen", "mean loss of 20 steps, nats"], "rows": curve},
    }
    for name, content in (
        ("config", CONFIG),
        ("generation_config", generation),
        ("tokenizer_config", described),
        ("training", record),
    ):
        (args.out / f"{name}.json").write_text(
            json.dumps(content, indent=1 if name != "training" else None) + "\n"
        )
    print(f"held-out perplexity {math.exp(loss):.2f}; written to {args.out}")


if __name__ == "__main__":
    main()
