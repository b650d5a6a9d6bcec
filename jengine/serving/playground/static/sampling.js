// The form of sampling parameters. An empty field is not sent: the server's default counts.

const FIELDS = [
  { name: "temperature", step: "0.1", min: 0, value: "0.8" },
  { name: "top_p", step: "0.05", min: 0, max: 1 },
  { name: "top_k", step: "1", min: -1 },
  { name: "min_p", step: "0.05", min: 0, max: 1 },
  { name: "max_tokens", step: "1", min: 1, value: "256" },
  { name: "seed", step: "1" },
  { name: "presence_penalty", step: "0.1", min: -2, max: 2 },
  { name: "frequency_penalty", step: "0.1", min: -2, max: 2 },
  { name: "repetition_penalty", step: "0.05", min: 0.05 },
  { name: "stop" },
];

export function makeFields(parent) {
  for (const { name, ...attributes } of FIELDS) {
    const label = document.createElement("label"), input = document.createElement("input");
    Object.assign(input, { name, id: `sampling-${name}`, placeholder: "default", autocomplete: "off" }, attributes);
    if (attributes.step) input.type = "number";
    label.append(name.replaceAll("_", " "), input);
    parent.append(label);
  }
}

export function samplingOf(parent) {
  const given = {};
  for (const input of parent.querySelectorAll("input")) {
    if (input.value !== "") given[input.name] = input.type === "number" ? Number(input.value) : [unescaped(input.value)];
  }
  return given;
}

// A stop string's line breaks and tabs, as one types them.
function unescaped(text) {
  return text.replaceAll("\\n", "\n").replaceAll("\\t", "\t");
}
