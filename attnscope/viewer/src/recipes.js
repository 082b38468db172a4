/** What makes the numbers of a view again: a command of the shell, and lines of Python, for what is chosen. */

/**
 * @typedef {import("./types.js").State} State
 * @typedef {import("./types.js").Page} Page
 * @typedef {import("./side.js").Side} Side
 * @typedef {{name: string, text: string}} Recipe
 */

/**
 * @param {Page} page @param {State} state @param {[number, number][]|null} keys chosen or suggested
 * @returns {Recipe[]} none where the page knows no command that made it
 */
export function recipes(page, state, keys) {
  const side = page.side(state);
  if (state.view === "cuts" || state.view === "depth") return ofStudy(page, state.view);
  const { commands = {}, python = [] } = page.data.copied ?? {};
  const first = page.shown(state) === 0;
  const chosen = new Chosen(page, state, keys);
  const command = first || state.view === "compare" ? chosen.command(commands) : null;
  const found = [];
  if (command) found.push({ name: "Command of this view", text: command });
  if (commands.view && first)
    found.push({ name: "Command of this page", text: joined("attnscope view", commands.view, ...chosen.page(), "--out page.html") });
  if (first) {
    const start = python.length ? python : ["# seen: the observation that this page was made of"];
    found.push({ name: "Python", text: [...start, ...chosen.python(side)].join("\n") });
  }
  return found;
}

/** @param {Page} page @param {"cuts"|"depth"} name @returns {Recipe[]} the run that the numbers are of */
function ofStudy(page, name) {
  const { command = null, python = [] } = page.sides.find(({ data }) => data[name])?.data[name] ?? {};
  const found = command ? [{ name: "Command of this view", text: command }] : [];
  return python.length ? [...found, { name: "Python", text: python.join("\n") }] : found;
}

/** @param {...string} words */
const joined = (...words) => words.filter(Boolean).join(" ");

class Chosen {
  /** @param {Page} page @param {State} state @param {[number, number][]|null} keys */
  constructor(page, state, keys) {
    const side = page.side(state);
    const { at, head } = state;
    this.state = state;
    this.layer = side.layers[at]?.layer ?? at;
    this.stack = side.stack(at).trim();
    this.name = `${this.stack && `${this.stack}.`}${this.layer}.${head}`;
    this.q = page.query(state);
    this.query = side.number(this.q);
    this.keys = (keys ?? []).map(([start, stop]) => [side.number(start), side.number(stop - 1)]);
  }

  get #key() {
    const places = this.keys.map(([start, last]) => (start === last ? String(start) : `${start}-${last}`));
    return places.length ? `--key ${places.join(",")}` : "";
  }

  /** What is asked of a pair of texts, else the chosen query alone. @param {string} query @returns {string[]} */
  #texts(query) {
    const { query: chosen, pair } = this.state;
    const [of, keys] = [...pair].map((text) => (text === "a" ? "text" : "pair"));
    if (pair === "all") return chosen === null ? [] : [query];
    return [chosen === null ? `--query ${of}` : query, `--key ${keys}`];
  }

  /** @returns {string[]} what opens the page at this head and these tokens */
  page() {
    return [`--select ${this.name}`, `--query ${this.query}`, this.#key];
  }

  /** @param {Record<string, string>} commands @returns {string|null} */
  command(commands) {
    const [command, ...words] = this.#words();
    return command in commands ? joined(`attnscope ${command}`, commands[command], ...words) : null;
  }

  /** @returns {string[]} a command and its options */
  #words() {
    const { state } = this;
    const select = `--select ${this.name}`;
    const query = `--query ${this.query}`;
    const colours = [state.log ? "--scale log" : "", state.sink === false ? "--sink mask" : ""];
    const units = [state.words ? "--group words" : "", state.least ? `--min-weight ${state.least}` : ""];
    const folder = `--out runs/${this.name.replaceAll(".", "-")}`;
    switch (state.view) {
      case "model":
        return ["draw", this.stack && `--select ${this.stack}`, "--figures overview", ...colours, "--out runs/overview"];
      case "metrics":
        return ["heads", this.stack && `--select ${this.stack}`, `--sort ${state.metric}`];
      case "matrix":
        return ["draw", select, "--figures heads", ...colours, folder];
      case "picture":
        return ["draw", select, query, "--figures picture", folder];
      case "text":
        return ["text", ...(state.over === "head" ? [select] : [`--mean ${state.over}`]), state.from === "query" ? query : this.#key];
      case "token":
        return ["heads", query, this.#key];
      case "steps":
        return ["explain", `--head ${this.name}`, query];
      case "why":
        return ["why", `--head ${this.name}`, query, this.#key];
      case "compare":
        return ["compare", select];
      default:
        return ["relations", select, ...this.#texts(query), "--top-k all", ...units];
    }
  }

  /** @param {Side} side @returns {string[]} */
  python(side) {
    const { head, view, at } = this.state;
    const of = side.stacks.length > 1 && side.stackOf(at) !== "decoder" ? `seen.of("${side.stackOf(at)}")` : "seen";
    const weights = `${of}.weights[${this.layer}][${head}]`;
    const [start, last] = this.keys[0] ?? [0, 0];
    const cell = start === last ? `${weights}[${this.query}, ${start}]` : `${weights}[${this.query}, ${start}:${last + 1}].sum()`;
    if (view === "metrics" || view === "token" || view === "model") return [`${of}.table()  # a row for each head`, cell];
    if (view === "text") return [`${weights}[${this.query}]  # what each key gets`];
    return [cell, `${of}.heatmap(${this.layer}, ${head}).save("L${this.layer}H${head}.png")`];
  }
}
