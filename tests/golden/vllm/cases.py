"""Requests for vLLM and jengine: two tiny models, and requests whose meaning was unclear. Plain data."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from tests.golden.weights import write_model

HERE = Path(__file__).parent
ANSWERS, BEAM_ANSWERS = HERE / "answers.json", HERE / "beams.json"
MAX_MODEL_LEN = 192


class Case(NamedTuple):
    """One greedy request."""

    model: str
    prompt: str | list[int]
    params: dict[str, Any]  # fields of SamplingParams, over DEFAULTS


DEFAULTS: dict[str, Any] = {"temperature": 0.0, "max_tokens": 16, "logprobs": 3}
# bytes: GPT-2's kind of tokenizer; its </s> is no end-of-sequence in the model's own configuration.
# spaces: Llama 2's kind; a second end-of-sequence token beside </s>, an ordinary one.
MODELS: dict[str, dict[str, Any]] = {
    "bytes": {"vocab_size": 400, "eos_token_id": None},
    "spaces": {"vocab_size": 420, "eos_token_id": [2, 417]},
}


def write_case_model(folder: Path, name: str) -> None:
    """The folder of a case's model. Its tokenizer was trained once, by tests/text/conftest.py: ids differ
    from one training to the next.
    """
    # of head sizes vLLM's attention on a CPU takes few
    write_model(folder, "llama_gqa", head_dim=32, **MODELS[name])
    shutil.copy(HERE / f"{name}.tokenizer.json", folder / "tokenizer.json")
    special = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(special))


END = "The end of the story is the end."
RETURN = "def fibonacci(n):\n    return "
FOX = "The quick brown fox"
ENDS = {"logit_bias": {1: 100.0}}  # the tokenizer's </s>, at once
SANE = list(range(259, 420))  # tokens of `spaces` that are no single bytes

CASES: dict[str, Case] = {
    "plain": Case("bytes", END, {}),
    "plain, token ids": Case("bytes", [275, 298, 371, 269], {}),
    "one token": Case("bytes", END, {"max_tokens": 1}),
    "to the model's length": Case("bytes", [79] * 180, {"max_tokens": None}),
    # penalties
    "repetition_penalty": Case("bytes", END, {"repetition_penalty": 1.6}),
    "repetition_penalty, of the prompt alone": Case(
        "bytes", [0, 69, 69, 358, 343, 15], {"repetition_penalty": 3.0, "max_tokens": 2}
    ),
    "repetition_penalty below 1": Case("bytes", END, {"repetition_penalty": 0.5}),
    "presence_penalty": Case("bytes", FOX, {"presence_penalty": 2.0}),
    "presence_penalty below 0": Case("bytes", FOX, {"presence_penalty": -2.0}),
    "presence_penalty, of the prompt": Case(
        "bytes", [0, 69, 69, 358, 343, 15], {"presence_penalty": 2.0, "max_tokens": 2}
    ),
    "frequency_penalty": Case("bytes", FOX, {"frequency_penalty": 1.5}),
    "frequency_penalty below 0": Case("bytes", FOX, {"frequency_penalty": -1.5}),
    "all penalties": Case(
        "bytes", END, {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.7}
    ),
    "penalties and bias": Case(
        "bytes",
        END,
        {"repetition_penalty": 1.5, "frequency_penalty": 1.0, "logit_bias": {321: 4.0, 69: -2.0}},
    ),
    # logit_bias, allowed tokens, bad words
    "logit_bias": Case("bytes", END, {"logit_bias": {390: 3.0, 369: 2.5, 69: -100.0}}),
    "allowed_token_ids": Case("bytes", END, {"allowed_token_ids": [269, 298, 371, 392, 365]}),
    "allowed tokens and bias outside": Case(
        "bytes", END, {"allowed_token_ids": [269, 298, 371], "logit_bias": {5: 100.0}}
    ),
    "bad word of one token": Case("bytes", END, {"bad_words": ["d"]}),
    "bad word with a space in front": Case("bytes", END, {"bad_words": [" dog", " jumps"]}),
    "bad word without the space": Case("bytes", END, {"bad_words": ["the", "jumps"]}),
    "bad word, both forms": Case("bytes", RETURN, {"bad_words": ["the", "if", "+"]}),
    "bad word of several tokens": Case("bytes", END, {"bad_words": ["vΠ"]}),
    "bad word repeated": Case("bytes", END, {"bad_words": ["ququ"], "max_tokens": 24}),
    "bad word begun by the prompt": Case("bytes", END, {"bad_words": [".d", "end.d"]}),
    "bad words, no spaces in the tokenizer": Case(
        "spaces", FOX, {"bad_words": ["ret", "The y", "af", "is "]}
    ),
    # the end
    "</s>": Case("bytes", END, ENDS),
    "</s> shown": Case("bytes", END, {**ENDS, "skip_special_tokens": False}),
    "</s> included": Case(
        "bytes", END, {**ENDS, "include_stop_str_in_output": True, "skip_special_tokens": False}
    ),
    "</s> after min_tokens": Case("bytes", END, {**ENDS, "min_tokens": 4}),
    "</s> ignored": Case("bytes", END, {**ENDS, "ignore_eos": True, "max_tokens": 4}),
    "</s> ignored and shown": Case(
        "bytes", END, {**ENDS, "ignore_eos": True, "skip_special_tokens": False, "max_tokens": 4}
    ),
    "</s> ignored, min_tokens": Case(
        "bytes", END, {**ENDS, "ignore_eos": True, "min_tokens": 4, "max_tokens": 8}
    ),
    "</s> as a stop token": Case("bytes", END, {**ENDS, "stop_token_ids": [1]}),
    "</s> ignored, as a stop token": Case("bytes", END, {**ENDS, "stop_token_ids": [1], "ignore_eos": True}),
    "stop token": Case("bytes", END, {"stop_token_ids": [390]}),
    "stop token included": Case("bytes", END, {"stop_token_ids": [390], "include_stop_str_in_output": True}),
    "stop token, min_tokens": Case("bytes", END, {"stop_token_ids": [390, 69], "min_tokens": 8}),
    "stop token at max_tokens": Case("bytes", END, {"stop_token_ids": [390], "max_tokens": 4}),
    "stop token in the prompt": Case("bytes", END, {"stop_token_ids": [298, 15]}),
    "stop string": Case("bytes", END, {"stop": ["jumps"]}),
    "stop string included": Case("bytes", END, {"stop": ["jumps"], "include_stop_str_in_output": True}),
    "stop string inside a token": Case("bytes", END, {"stop": "um"}),
    "stop string inside a token, included": Case(
        "bytes", END, {"stop": "um", "include_stop_str_in_output": True}
    ),
    "stop string over tokens": Case("bytes", END, {"stop": ["Π d"]}),
    "two stop strings in a token": Case("bytes", END, {"stop": ["mps", "jum", "ps"]}),
    "stop string, min_tokens": Case("bytes", END, {"stop": ["jumps", "dog"], "min_tokens": 5}),
    "stop string begun before min_tokens": Case("bytes", END, {"stop": ["vΠ"], "min_tokens": 7}),
    "stop string in the prompt": Case("bytes", END, {"stop": ["story", ".d"]}),
    "stop string at max_tokens": Case("bytes", END, {"stop": ["jumps"], "max_tokens": 4}),
    "stop string of a special token": Case(
        "bytes", END, {**ENDS, "ignore_eos": True, "skip_special_tokens": False, "stop": ["</s>"]}
    ),
    # text
    "special tokens": Case("bytes", END, {"allowed_token_ids": [0, 269, 298, 399], "ignore_eos": True}),
    "special tokens shown": Case(
        "bytes", END, {"allowed_token_ids": [0, 269, 298, 399], "skip_special_tokens": False}
    ),
    "no text": Case("bytes", END, {"detokenize": False}),
    "unfinished character": Case("bytes", FOX, {"max_tokens": 24}),
    "space at the start": Case("spaces", RETURN, {"allowed_token_ids": SANE}),
    "space at the start, token ids": Case("spaces", [402, 412, 386, 352], {"allowed_token_ids": SANE}),
    "spaces": Case("spaces", FOX, {"allowed_token_ids": SANE, "max_tokens": 32}),
    "spaces alone": Case("spaces", FOX, {"allowed_token_ids": [305, 319, 323, 351]}),
    "bytes that are no text": Case("spaces", RETURN, {"max_tokens": 24}),
    "second end-of-sequence": Case("spaces", FOX, {"logit_bias": {417: 100.0}}),
    "second end-of-sequence ignored": Case(
        "spaces", FOX, {"logit_bias": {417: 100.0}, "ignore_eos": True, "max_tokens": 3}
    ),
    "second end-of-sequence included": Case(
        "spaces", FOX, {"logit_bias": {417: 100.0}, "include_stop_str_in_output": True}
    ),
    "second end-of-sequence, min_tokens": Case("spaces", FOX, {"logit_bias": {417: 100.0}, "min_tokens": 3}),
    # log probabilities
    "logprobs of the chosen alone": Case("bytes", END, {"logprobs": 0}),
    "logprobs 1": Case("bytes", END, {"logprobs": 1}),
    "logprobs 20": Case("bytes", END, {"logprobs": 20, "max_tokens": 4}),
    "no logprobs": Case("bytes", END, {"logprobs": None}),
    "prompt_logprobs 0": Case("bytes", END, {"prompt_logprobs": 0, "max_tokens": 1}),
    "prompt_logprobs 3": Case("bytes", END, {"prompt_logprobs": 3, "max_tokens": 1}),
    "logprobs under a mask": Case(
        "bytes", END, {"logprobs": 4, "allowed_token_ids": [269, 298, 371, 392, 365]}
    ),
    "logprobs, a second tokenizer": Case("spaces", FOX, {"allowed_token_ids": SANE, "prompt_logprobs": 1}),
    "prompt_logprobs, penalties": Case(
        "bytes", END, {"prompt_logprobs": 1, "repetition_penalty": 2.0, "frequency_penalty": 1.0}
    ),
    # parameters that leave the likeliest token
    "top_k 1": Case("bytes", END, {"temperature": 1.0, "top_k": 1, "seed": 3}),
    "top_p next to nothing": Case("bytes", END, {"temperature": 1.0, "top_p": 1e-6, "seed": 3}),
    "min_p 1": Case("bytes", END, {"temperature": 1.0, "min_p": 1.0, "seed": 3}),
    "many at once": Case(
        "bytes",
        END,
        {
            **{
                "repetition_penalty": 1.2,
                "frequency_penalty": 0.8,
                "logit_bias": {321: 2.0, 390: -3.0},
                "bad_words": ["vΠ", "d"],
            },
            **{
                "stop_token_ids": [199],
                "min_tokens": 9,
                "allowed_token_ids": list(range(400)),
                "stop": ["ȸ"],
            },
        },
    ),
    # structured output
    "choice": Case("bytes", END, {"structured_outputs": {"choice": ["dog", "quick fox", "jumps over"]}}),
    "regex": Case("bytes", END, {"structured_outputs": {"regex": r"[a-c]{3}-\d\d"}}),
    "regex that need not end": Case("bytes", END, {"structured_outputs": {"regex": r"(the|quick| )+"}}),
    "json": Case(
        "bytes", END, {"structured_outputs": {"json": {"enum": ["the end", 12, None]}}, "max_tokens": 24}
    ),
    "regex, ignore_eos": Case(
        "bytes", END, {"structured_outputs": {"regex": "ab"}, "ignore_eos": True, "max_tokens": 6}
    ),
    "regex, bad word": Case(
        "bytes", END, {"structured_outputs": {"regex": "(the|quick|dog)+"}, "bad_words": ["the", "quick"]}
    ),
    "regex, stop string": Case("bytes", END, {"structured_outputs": {"regex": "[a-e]{8}"}, "stop": ["d"]}),
    "regex, min_tokens": Case("bytes", END, {"structured_outputs": {"regex": "[ab]{3,6}"}, "min_tokens": 5}),
    "grammar": Case(
        "bytes", END, {"structured_outputs": {"grammar": 'start: "the" rest\nrest: " dog" | " fox" rest'}}
    ),
    "choice, a second tokenizer": Case(
        "spaces", FOX, {"structured_outputs": {"choice": ["the end", "The dog"]}}
    ),
    "regex with a space at the start": Case("spaces", FOX, {"structured_outputs": {"regex": " (the|a) end"}}),
}

# Beam searches: fields of BeamSearchParams.
BEAMS: dict[str, Case] = {
    "plain": Case("bytes", END, {"beam_width": 4, "max_tokens": 8}),
    "wide": Case("bytes", FOX, {"beam_width": 8, "max_tokens": 10}),
    "one beam": Case("bytes", FOX, {"beam_width": 1, "max_tokens": 6}),
    "one token": Case("bytes", END, {"beam_width": 3, "max_tokens": 1}),
    "short outputs": Case("bytes", END, {"beam_width": 3, "max_tokens": 8, "length_penalty": -1.0}),
    "long outputs": Case("bytes", END, {"beam_width": 3, "max_tokens": 8, "length_penalty": 3.0}),
    "token ids": Case(
        "bytes", [275, 298, 371, 269], {"beam_width": 3, "max_tokens": 6, "length_penalty": 0.0}
    ),
    "end-of-sequence": Case("bytes", [1], {"beam_width": 8, "max_tokens": 12, "length_penalty": 0.0}),
    "ignore_eos": Case(
        "bytes", [1], {"beam_width": 8, "max_tokens": 12, "length_penalty": 0.0, "ignore_eos": True}
    ),
    "a second tokenizer": Case("spaces", FOX, {"beam_width": 4, "max_tokens": 8}),
}

# What both must refuse.
REFUSED: dict[str, dict[str, Any]] = {
    "min_tokens above max_tokens": {"min_tokens": 17},
    "no allowed token": {"allowed_token_ids": []},
    "allowed token outside the vocabulary": {"allowed_token_ids": [400]},
    "bias outside the vocabulary": {"logit_bias": {400: 1.0}},
    "stop string without text": {"stop": ["a"], "detokenize": False},
    "empty stop string": {"stop": [""]},
    "negative temperature": {"temperature": -0.1},
    "top_p 0": {"top_p": 0.0},
    "top_p above 1": {"top_p": 1.1},
    "top_k below -1": {"top_k": -2},
    "min_p above 1": {"min_p": 1.1},
    "presence_penalty above 2": {"presence_penalty": 2.1},
    "frequency_penalty below -2": {"frequency_penalty": -2.1},
    "repetition_penalty 0": {"repetition_penalty": 0.0},
    "max_tokens 0": {"max_tokens": 0},
    "logprobs above 20": {"logprobs": 21},
    "two structures": {"structured_outputs": {"regex": "a", "choice": ["b"]}},
    "regex that cannot be read": {"structured_outputs": {"regex": "("}},
    "stop_token_ids that are text": {"stop_token_ids": ["a"]},
}
