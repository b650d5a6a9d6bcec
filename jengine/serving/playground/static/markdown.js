// Markdown as data, [tag, children, address], and as elements: the part of it that models write. HTML in it stays text.

const FENCE = /^ {0,3}(`{3,}|~{3,})[\w+#.:={}" -]*$/, HEADING = /^ {0,3}(#{1,6})\s+(.*?)(?:\s+#+)?\s*$/, RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])( +|$)/, QUOTE = /^ {0,3}> ?/, ROW = /^\s*\|.*\|\s*$/, UNDERLINE = /^\s*\|(?:\s*:?-+:?\s*\|)+\s*$/;
const LONGEST = 1000; // characters of what is emphasized: bounds the search for its end
const SPAN = new RegExp(
  [
    "(`+)(?!`)([^]{1,L}?[^`]|[^`])\\1(?!`)",
    "\\[([^\\]\\n]{1,L})\\]\\((https?://[^\\s()<>]{1,L})\\)",
    "\\*\\*(?=\\S)([^]{0,L}?\\S)\\*\\*(?!\\*)",
    "\\*(?=[^\\s*])([^*]{0,L}?[^\\s*])\\*(?!\\*)",
    "~~(?=\\S)([^]{0,L}?\\S)~~",
  ].join("|").replaceAll("L}", `${LONGEST}}`),
);
const DEEPEST = 6; // lists and quotes within each other

export function parse(text, depth = 0) {
  const lines = text.replaceAll("\r\n", "\n").split("\n"), out = [];
  let at = 0;
  const take = (fits) => {
    const begun = at;
    while (at < lines.length && fits(lines[at], at - begun)) at++;
    return lines.slice(begun, at);
  };
  while (at < lines.length) {
    const line = lines[at], fence = FENCE.exec(line), heading = HEADING.exec(line), deep = depth >= DEEPEST;
    if (!line.trim()) at++;
    else if (fence) {
      at++;
      const inside = take((one) => !(one.trim().startsWith(fence[1]) && !one.trim().replaceAll(fence[1][0], "")));
      at++;
      out.push(["pre", [["code", [inside.join("\n")]]]]);
    } else if (heading) at++, out.push([`h${Math.min(heading[1].length + 2, 6)}`, inline(heading[2])]);
    else if (RULE.test(line)) at++, out.push(["hr", []]);
    else if (QUOTE.test(line) && !deep) out.push(["blockquote", parse(take((one) => QUOTE.test(one)).map((one) => one.replace(QUOTE, "")).join("\n"), depth + 1)]);
    else if (ITEM.test(line) && !deep) out.push(list(take, ITEM.exec(line), depth));
    else if (ROW.test(line) && UNDERLINE.test(lines[at + 1] ?? "")) out.push(table(take((one) => ROW.test(one))));
    else out.push(["p", inline(take((one, i) => !i || (one.trim() && !begins(one))).join("\n"))]);
  }
  return out;
}

function begins(line) {
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || ITEM.test(line);
}

// Items with one kind of mark; what is indented below one belongs to it.
function list(take, first, depth) {
  const ordered = /\d/.test(first[2]), indent = first[1].length, items = [];
  const own = (line) => {
    const item = ITEM.exec(line);
    return item && item[1].length <= indent + 1 && /\d/.test(item[2]) === ordered && !RULE.test(line) ? item : null;
  };
  const within = (line) => !line.trim() || line.search(/\S/) > indent + 1;
  take((line) => {
    const item = own(line);
    if (item) items.push([line.slice(item[0].length)]);
    else if (within(line) || (!begins(line) && items.at(-1).at(-1).trim())) items.at(-1).push(line);
    else return false;
    return true;
  });
  const body = (lines) => {
    const [head, ...rest] = lines, least = Math.min(...rest.filter((line) => line.trim()).map((line) => line.search(/\S/)));
    const found = parse([head, ...rest.map((line) => line.slice(Number.isFinite(least) ? least : 0))].join("\n"), depth + 1);
    return found[0]?.[0] === "p" ? [...found[0][1], ...found.slice(1)] : found; // a short item is not a paragraph
  };
  return [ordered ? "ol" : "ul", items.map((lines) => ["li", body(lines)]), ordered ? Number.parseInt(first[2], 10) : undefined];
}

function table([head, , ...rows]) {
  const cells = (tag, line) => ["tr", line.trim().slice(1, -1).split(/(?<!\\)\|/).map((cell) => [tag, inline(cell.trim().replaceAll("\\|", "|"))])];
  return ["table", [cells("th", head), ...rows.map((row) => cells("td", row))]];
}

function inline(text, depth = 0) {
  const out = [], more = (inner) => (depth < DEEPEST ? inline(inner, depth + 1) : [inner]);
  for (let found; (found = SPAN.exec(text)); text = text.slice(found.index + found[0].length)) {
    if (found.index) out.push(text.slice(0, found.index));
    const [, , code, label, address, strong, emphasis, struck] = found;
    if (code !== undefined) out.push(["code", [code]]);
    else if (address) out.push(["a", [label], address]);
    else if (strong !== undefined) out.push(["strong", more(strong)]);
    else if (emphasis !== undefined) out.push(["em", more(emphasis)]);
    else out.push(["del", more(struck)]);
  }
  return text ? [...out, text] : out;
}

// Elements of known kinds with text nodes; addresses begin with http.
export function build(nodes) {
  const made = document.createDocumentFragment();
  for (const node of nodes) {
    if (typeof node === "string") {
      made.append(node);
      continue;
    }
    const [tag, children, more] = node, element = document.createElement(tag);
    if (tag === "a") Object.assign(element, { href: more, target: "_blank", rel: "noopener noreferrer nofollow" });
    if (tag === "ol" && more !== undefined) element.start = more;
    element.append(build(children));
    made.append(element);
  }
  return made;
}
