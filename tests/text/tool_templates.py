"""Chat templates written for these tests: what the templates of models do with calls, in few words."""

from __future__ import annotations

# joins role and content, without tools
SMOLLM2 = """{% for message in messages %}
{%- if loop.first and message['role'] != 'system' %}{{ '<|im_start|>system\\nYou help.<|im_end|>\\n' }}{% endif %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# calls as JSON, arguments as text or as an object; no developers; reasoning after the last question
QWEN_3 = """{%- if messages[0].role == 'system' or tools %}{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content }}{% endif %}
{%- for tool in tools or [] %}{{- '\\n' }}{{- tool | tojson }}{% endfor %}{{- '<|im_end|>\\n' }}{% endif %}
{%- set ns = namespace(last=0) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- elif m.role == 'assistant' %}{{- '<|im_start|>assistant\\n' }}
{%- if m.reasoning_content is string and loop.index0 > ns.last %}
{{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}
{{- m.content if m.content is string else '' }}
{%- for call in m.tool_calls or [] %}{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{%- if call.function.arguments is string %}{{- call.function.arguments }}
{%- else %}{{- call.function.arguments | tojson }}{% endif %}{{- '}\\n</tool_call>' }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- elif m.role == 'tool' %}{{- '<|im_start|>user\\n<tool_response>' + m.content + '</tool_response><|im_end|>\\n' }}
{%- endif %}{% endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""

# parameters as tags; a second system message, and an unknown role, are errors
QWEN_3_5 = """{%- for m in messages %}
{%- if m.role == 'system' %}
{%- if not loop.first %}{{- raise_exception('System message must be at the beginning.') }}{% endif %}
{{- '<|im_start|>system\\n' + m.content + '<|im_end|>\\n' }}
{%- elif m.role == 'user' %}{{- '<|im_start|>user\\n' + m.content + '<|im_end|>\\n' }}
{%- elif m.role == 'assistant' %}{{- '<|im_start|>assistant\\n' + m.content }}
{%- for call in m.tool_calls or [] %}{{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
{%- for name, value in call.function.arguments | items %}{{- '<parameter=' + name + '>\\n' }}
{{- value if value is string else value | tojson }}{{- '\\n</parameter>\\n' }}{% endfor %}
{{- '</function>\\n</tool_call>' }}{% endfor %}{{- '<|im_end|>\\n' }}
{%- elif m.role == 'tool' %}{{- '<|im_start|>user\\n' + m.content + '<|im_end|>\\n' }}
{%- else %}{{- raise_exception('Unexpected message role.') }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{% endif %}{#- {{ tools }} #}"""

# one call in a message, without its text; results of the role ipython
LLAMA_3_1 = """{%- set first = messages[0].content if messages[0].role == 'system' else '' %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' + first + '<|eot_id|>' }}
{%- for tool in tools or [] %}{{- tool | tojson }}{% endfor %}
{%- for m in (messages[1:] if messages[0].role == 'system' else messages) %}
{%- if 'tool_calls' in m %}
{%- if m.tool_calls | length != 1 %}{{- raise_exception('Only single tool-calls at once!') }}{% endif %}
{%- set call = m.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
{{- call.arguments | tojson }}{{- '}<|eot_id|>' }}
{%- elif m.role == 'tool' %}{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}{{- m.content | tojson }}{{- '<|eot_id|>' }}
{%- else %}{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}
{%- endif %}{% endfor %}{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

# calls as Python
LLAMA_3_2 = """{#- [func_name1( #}{%- for m in messages %}{{- '<|' + m.role + '|>' + (m.content or '') }}
{%- if m.tool_calls %}{{- '[' }}{%- for call in m.tool_calls %}{{- call.function.name + '(' }}
{%- for name, value in call.function.arguments.items() %}{{- name + '=' }}{{- value | tojson }}
{%- if not loop.last %}{{- ', ' }}{% endif %}{% endfor %}{{- ')' }}{%- if not loop.last %}{{- ', ' }}{% endif %}
{%- endfor %}{{- ']' }}{% endif %}{% endfor %}{{- '<|assistant|>' if add_generation_prompt }}{#- {{ tools }} #}"""

# ids of nine letters or digits, turns that alternate, text or calls
MISTRAL = """{%- if messages[0].role == 'system' %}{%- set system, turns = messages[0].content, messages[1:] %}
{%- else %}{%- set system, turns = '', messages %}{% endif %}
{%- set ns = namespace(at=0) %}{%- for m in turns %}
{%- if m.role == 'user' or (m.role == 'assistant' and m.tool_calls is not defined) %}
{%- if (m.role == 'user') != (ns.at % 2 == 0) %}{{- raise_exception('roles must alternate') }}{% endif %}
{%- set ns.at = ns.at + 1 %}{% endif %}{% endfor %}{{- bos_token }}
{%- for m in turns %}
{%- if m.role == 'user' %}{{- '[INST] ' + (system + '\\n\\n' if loop.first else '') + m.content + '[/INST]' }}
{%- elif m.tool_calls is defined %}{{- '[TOOL_CALLS] [' }}{%- for call in m.tool_calls %}
{%- if call.id is not defined or call.id | length != 9 %}{{- raise_exception('ids must have length 9!') }}{% endif %}
{{- '{"name": "' + call.function.name + '", "arguments": ' }}{{- call.function.arguments | tojson }}
{{- ', "id": "' + call.id + '"}' }}{%- if not loop.last %}{{- ', ' }}{% endif %}{% endfor %}{{- ']' + eos_token }}
{%- elif m.role == 'assistant' %}{{- ' ' + m.content + eos_token }}
{%- elif m.role == 'tool' %}
{%- if m.tool_call_id is not defined or m.tool_call_id | length != 9 %}{{- raise_exception('ids!') }}{% endif %}
{{- '[TOOL_RESULTS] {"content": ' + m.content + ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- else %}{{- raise_exception('Only user, assistant and tool roles!') }}{% endif %}{% endfor %}"""

# null content for calls, arguments as text (V3 and R1)
DEEPSEEK_R1 = """{%- set ns = namespace(system='') %}{%- for m in messages %}{%- if m['role'] == 'system' %}
{%- set ns.system = ns.system + m['content'] %}{% endif %}{% endfor %}{{- bos_token + ns.system }}
{%- for m in messages %}{%- if m['role'] == 'user' %}{{- '<\uff5cUser\uff5c>' + m['content'] }}{% endif %}
{%- if m['role'] == 'assistant' and m['content'] is none %}{{- '<\uff5cAssistant\uff5c><\uff5ctool▁calls▁begin\uff5c>' }}
{%- for t in m['tool_calls'] %}{{- '<\uff5ctool▁call▁begin\uff5c>' + t['type'] + '<\uff5ctool▁sep\uff5c>' + t['function']['name']
+ '\\n```json\\n' + t['function']['arguments'] + '\\n```<\uff5ctool▁call▁end\uff5c>' }}{% endfor %}{{- '<\uff5ctool▁calls▁end\uff5c>' }}{% endif %}
{%- if m['role'] == 'assistant' and m['content'] is not none %}{{- '<\uff5cAssistant\uff5c>' + m['content'].split('</think>')[-1] }}{% endif %}
{%- if m['role'] == 'tool' %}{{- '<\uff5ctool▁output▁begin\uff5c>' + m['content'] + '<\uff5ctool▁output▁end\uff5c>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{- '<\uff5cAssistant\uff5c><think>\\n' }}{% endif %}"""

# the last system message, and the text after the calls
DEEPSEEK_R1_DISTILL = """{%- set ns = namespace(system='') %}{%- for m in messages %}{%- if m['role'] == 'system' %}
{%- set ns.system = m['content'] %}{% endif %}{% endfor %}{{- bos_token + ns.system }}
{%- for m in messages %}{%- if m['role'] == 'user' %}{{- '<\uff5cUser\uff5c>' + m['content'] }}{% endif %}
{%- if m['role'] == 'assistant' and m['tool_calls'] %}{%- for t in m['tool_calls'] %}
{{- '<\uff5ctool▁call▁begin\uff5c>' + t['function']['name'] + '\\n' + t['function']['arguments'] + '<\uff5ctool▁call▁end\uff5c>' }}
{%- endfor %}{% endif %}
{%- if m['role'] == 'assistant' and m['content'] is not none %}{{- '<\uff5cAssistant\uff5c>' + m['content'] }}{% endif %}
{%- if m['role'] == 'tool' %}{{- '<\uff5ctool▁output▁begin\uff5c>' + m['content'] + '<\uff5ctool▁output▁end\uff5c>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{- '<\uff5cAssistant\uff5c><think>\\n' }}{% endif %}"""

DEEPSEEK_V3_1 = """{%- for m in messages %}{%- if m['role'] == 'system' %}{{- m['content'] }}{% endif %}{% endfor %}
{%- for m in messages %}{%- if m['role'] == 'user' %}{{- '<\uff5cUser\uff5c>' + m['content'] }}{% endif %}
{%- if m['role'] == 'assistant' and m['tool_calls'] is defined and m['tool_calls'] is not none %}
{{- '<\uff5cAssistant\uff5c></think>' }}{%- for t in m['tool_calls'] %}{%- if loop.first %}
{%- if m['content'] is none %}{{- '<\uff5ctool▁calls▁begin\uff5c>' }}{% else %}{{- m['content'] + '<\uff5ctool▁calls▁begin\uff5c>' }}{% endif %}{% endif %}
{{- '<\uff5ctool▁call▁begin\uff5c>' + t['function']['name'] + '<\uff5ctool▁sep\uff5c>' + t['function']['arguments'] + '<\uff5ctool▁call▁end\uff5c>' }}
{%- endfor %}{{- '<\uff5ctool▁calls▁end\uff5c>' }}
{%- elif m['role'] == 'assistant' %}{{- '<\uff5cAssistant\uff5c></think>' + m['content'] }}{% endif %}
{%- if m['role'] == 'tool' %}{{- '<\uff5ctool▁output▁begin\uff5c>' + m['content'] + '<\uff5ctool▁output▁end\uff5c>' }}{% endif %}{% endfor %}
{{- '<\uff5cAssistant\uff5c></think>' if add_generation_prompt }}"""

# a call's id has the function's name
KIMI_K2 = """{%- for m in messages %}{{- '<|im_' + m.role + '|>' + (m.content or '') }}
{%- if m.role == 'tool' %}{{- '\\n## Return of ' + m.tool_call_id }}{% endif %}
{%- if m.tool_calls %}{{- '<|tool_calls_section_begin|>' }}{%- for call in m.tool_calls %}
{{- '<|tool_call_begin|>' + call.id + '<|tool_call_argument_begin|>' }}
{%- if call.function.arguments is string %}{{- call.function.arguments }}
{%- else %}{{- call.function.arguments | tojson }}{% endif %}{{- '<|tool_call_end|>' }}{% endfor %}
{{- '<|tool_calls_section_end|>' }}{% endif %}{{- '<|im_end|>' }}{% endfor %}{#- {{ tools }} #}"""

GLM_4_5 = """{%- for m in messages %}
{%- if m.role == 'assistant' %}{{- '<|assistant|>\\n' + (m.content or '') }}
{%- for call in m.tool_calls or [] %}{{- '\\n<tool_call>' + call.function.name }}
{%- for name, value in call.function.arguments.items() %}{{- '\\n<arg_key>' + name + '</arg_key>\\n<arg_value>' }}
{{- value if value is string else value | tojson }}{{- '</arg_value>' }}{% endfor %}{{- '\\n</tool_call>' }}{% endfor %}
{%- elif m.role == 'tool' %}{{- '<|observation|>\\n<tool_response>' + m.content + '</tool_response>' }}
{%- elif m.role in ('system', 'user') %}{{- '<|' + m.role + '|>\\n' + m.content }}{% endif %}{% endfor %}
{{- '<|assistant|>\\n' if add_generation_prompt }}{#- {{ tools }} #}"""

MINIMAX_M2 = """{%- for m in messages %}{{- ']~b]' + m.role + '\\n' }}{%- if m.content %}{{- m.content }}{% endif %}
{%- if m.tool_calls %}{{- '\\n<minimax:tool_call>\\n' }}{%- for call in m.tool_calls %}
{{- '<invoke name="' + call.function.name + '">\\n' }}{%- for name, value in call.function.arguments.items() %}
{{- '<parameter name="' + name + '">' }}{{- value if value is string else value | tojson }}{{- '</parameter>\\n' }}
{%- endfor %}{{- '</invoke>\\n' }}{% endfor %}{{- '</minimax:tool_call>' }}{% endif %}{{- '[e~[\\n' }}{% endfor %}"""

# a first message of either role is the developer's; one call in a message, with text or reasoning, up to the answer
GPT_OSS = """{{- '<|start|>system<|message|>You are ChatGPT.<|end|>' }}
{%- set turns = messages %}{%- if messages[0].role in ('developer', 'system') %}{%- set turns = messages[1:] %}
{{- '<|start|>developer<|message|># Instructions\\n' + messages[0].content + '<|end|>' }}{% endif %}
{%- set last = namespace(name=none) %}{%- for m in turns %}
{%- if m.role == 'assistant' and 'tool_calls' in m %}{%- set call = m.tool_calls[0].function %}
{%- if m.content and m.thinking %}{{- raise_exception('Cannot pass both content and thinking!') }}{% endif %}
{%- set later = namespace(answer=false) %}{%- for other in turns[loop.index:] %}
{%- if other.role == 'assistant' and 'tool_calls' not in other %}{%- set later.answer = true %}{% endif %}{% endfor %}
{%- if (m.content or m.thinking) and not later.answer %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + (m.content or m.thinking) + '<|end|>' }}{% endif %}
{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
{{- call.arguments | tojson }}{{- '<|call|>' }}{%- set last.name = call.name %}
{%- elif m.role == 'assistant' %}{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}
{%- elif m.role == 'tool' %}
{%- if last.name is none %}{{- raise_exception('no tool call before this result') }}{% endif %}
{{- '<|start|>functions.' + last.name + ' to=assistant<|message|>' }}{{- m.content | tojson }}{{- '<|end|>' }}
{%- elif m.role == 'user' %}{{- '<|start|>user<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}
{{- '<|start|>assistant' if add_generation_prompt }}"""

# no system messages, no tools, turns that alternate
GEMMA_2 = """{{- bos_token }}{%- if messages[0].role == 'system' %}{{- raise_exception('System role not supported') }}{% endif %}
{%- for m in messages %}{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception('roles must alternate') }}{% endif %}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' + m.content | trim + '<end_of_turn>\\n' }}{% endfor %}
{{- '<start_of_turn>model\\n' if add_generation_prompt }}"""

# contents as lists of parts, with images
QWEN_VL = """{%- macro show(content) %}{%- if content is string %}{{- content }}{%- else %}{%- for part in content or [] %}
{{- '<|image_pad|>' if part.type == 'image' else part.text }}{% endfor %}{% endif %}{% endmacro %}
{%- for tool in tools or [] %}{{- tool | tojson }}{% endfor %}
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + show(m.content) }}
{%- for call in m.tool_calls or [] %}{{- '<tool_call>' }}{{- call.function | tojson }}{{- '</tool_call>' }}{% endfor %}
{{- '<|im_end|>\\n' }}{% endfor %}{{- '<|im_start|>assistant\\n' if add_generation_prompt }}"""

# results with the function's name
NAMED_RESULTS = """{%- for m in messages %}{{- '<' + m.role + '>' + (m.content or '') }}
{%- for call in m.tool_calls or [] %}{{- call.function | tojson }}{% endfor %}
{%- if m.role == 'tool' %}{{- '</' + m.name + '>' }}{% endif %}{% endfor %}"""

ALL = {
    "SmolLM2": SMOLLM2,
    "Qwen 3": QWEN_3,
    "Qwen 3.5": QWEN_3_5,
    "Llama 3.1": LLAMA_3_1,
    "Llama 3.2": LLAMA_3_2,
    "Mistral": MISTRAL,
    "DeepSeek R1": DEEPSEEK_R1,
    "DeepSeek R1 Distill": DEEPSEEK_R1_DISTILL,
    "DeepSeek V3.1": DEEPSEEK_V3_1,
    "Kimi K2": KIMI_K2,
    "GLM 4.5": GLM_4_5,
    "MiniMax M2": MINIMAX_M2,
    "gpt-oss": GPT_OSS,
    "Gemma 2": GEMMA_2,
    "Qwen VL": QWEN_VL,
    "named results": NAMED_RESULTS,
}
