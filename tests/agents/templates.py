"""Templates in the format of Qwen3, for which the scripted engine answers."""

from __future__ import annotations

from tests.text.tool_templates import QWEN_3

# as those that raise for a conversation of another form
STRICT = """{%- for m in messages %}{%- if m.role == 'system' and not loop.first %}
{{- raise_exception('System message must be at the beginning.') }}{% endif %}
{%- if m.role not in ['system', 'user', 'assistant', 'tool'] %}
{{- raise_exception('Unexpected message role.') }}{% endif %}{%- endfor %}"""
NO_THOUGHT = """{%- if add_generation_prompt and enable_thinking is false %}
{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}"""
TEMPLATES = {"qwen3": QWEN_3 + NO_THOUGHT, "strict": STRICT + QWEN_3 + NO_THOUGHT}
