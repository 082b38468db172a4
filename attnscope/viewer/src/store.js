/**
 * The state: one selection for all views, written after `#` so that a link or a reload shows the same thing.
 *
 * @typedef {import("./types.js").State} State
 */

export const VIEWS = ["model", "metrics", "head", "matrix", "text", "picture", "token", "steps", "why", "cuts", "depth", "compare"];

/** @type {State} */
export const DEFAULTS = {
  view: "model",
  at: 0,
  head: 0,
  query: null,
  key: null,
  keyEnd: null,
  group: "",
  heads: [],
  pin: false,
  sink: null,
  special: true,
  least: 0,
  log: false,
  words: false,
  part: "all",
  pair: "all",
  side: "0",
  metric: "focus",
  theme: "auto",
  from: "query",
  over: "head",
};

/** @type {Record<string, readonly string[]>} */
const CHOICES = {
  view: VIEWS,
  part: ["all", "prompt", "answer"],
  pair: ["all", "ab", "ba", "aa", "bb"],
  side: ["0", "1", "diff"],
  theme: ["auto", "light", "dark"],
  from: ["query", "key"],
  over: ["head", "layer", "all"],
};
const ALWAYS = ["view", "at", "head"]; // written even where they are the default: a link says what it shows
const STEPS_BACK = ["view", "at", "head", "query", "key", "side"]; // a change of these can be gone back from
const SETTLE = 150; // ms: a slider or a held key writes one address, not sixty a second

/**
 * The part of the state that a hash names; what it does not name or cannot mean is left out.
 *
 * @param {string} hash
 * @returns {Partial<State>}
 */
export function parse(hash) {
  const said = new URLSearchParams(hash.replace(/^#/, ""));
  if (!said.has("at") && said.has("layer")) said.set("at", /** @type {string} */ (said.get("layer")));
  /** @type {Record<string, unknown>} */
  const state = {};
  for (const [name, usual] of Object.entries(DEFAULTS)) {
    const text = said.get(name);
    const value = text === null ? undefined : read(name, text, usual);
    if (value !== undefined) state[name] = value;
  }
  return state;
}

/** @param {string} name @param {string} text @param {unknown} usual */
function read(name, text, usual) {
  if (name in CHOICES) return CHOICES[name].includes(text) ? text : undefined;
  if (name === "metric" || name === "group") return text;
  if (name === "heads")
    return text
      .split(",")
      .filter((one) => /^\d+\.\d+$/.test(one))
      .map(headOf);
  if (typeof usual === "boolean" || name === "sink") return text === "1" ? true : text === "0" ? false : undefined;
  const value = text.trim() === "" ? NaN : Number(text);
  if (name === "least") return value >= 0 && value <= 1 ? value : undefined;
  return Number.isInteger(value) && value >= 0 ? value : undefined;
}

/** @param {string} name `at.head` */
export function headOf(name) {
  const [at, head] = name.split(".").map(Number);
  return { at, head };
}

/** @param {State} state what stands after `#`: defaults are left out */
export function write(state) {
  const parts = new URLSearchParams();
  for (const [name, value] of Object.entries(state)) {
    const text = spell(value);
    if (ALWAYS.includes(name) || text !== spell(DEFAULTS[/** @type {keyof State} */ (name)])) parts.set(name, text);
  }
  return parts.toString().replaceAll("%2C", ",");
}

/** @param {unknown} value */
function spell(value) {
  if (typeof value === "boolean") return value ? "1" : "0";
  if (Array.isArray(value)) return value.map(({ at, head }) => `${at}.${head}`).join(",");
  return value === null ? "" : String(value);
}

export class Store {
  /**
   * @param {string} open the hash to start with where the address has none
   * @param {(state: State) => State} clean brings a state to what the page holds
   */
  constructor(open, clean) {
    this.clean = clean;
    /** @type {Set<(state: State, before: State) => void>} */
    this.listeners = new Set();
    /** @type {State} */
    this.state = clean({ ...DEFAULTS, ...parse(location.hash.length > 1 ? location.hash : open) });
    this.written = write(this.state);
    /** @type {ReturnType<typeof setTimeout>|undefined} */
    this.timer = undefined;
    this.back = false; // whether the change not yet written is one to go back from
    addEventListener("hashchange", () => this.#follow());
    addEventListener("popstate", () => this.#follow());
    addEventListener("pagehide", () => this.flush());
    this.#address(false);
  }

  /** @param {Partial<State>} change */
  set(change) {
    const before = this.state;
    const after = this.clean({ ...before, ...change });
    if (write(after) === write(before)) return;
    this.state = after;
    this.back ||= STEPS_BACK.some((name) => Reflect.get(after, name) !== Reflect.get(before, name));
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.flush(), SETTLE);
    for (const listener of this.listeners) listener(after, before);
  }

  /** @param {(state: State, before: State) => void} listener */
  subscribe(listener) {
    this.listeners.add(listener);
  }

  /** Writes the address now. */
  flush() {
    clearTimeout(this.timer);
    if (write(this.state) !== this.written) this.#address(this.back);
    this.back = false;
  }

  /** @param {boolean} push */
  #address(push) {
    this.written = write(this.state);
    try {
      history[push ? "pushState" : "replaceState"](null, "", `#${this.written}`);
    } catch {
      // a sandboxed frame of a notebook has no address to write
    }
  }

  #follow() {
    const hash = location.hash.slice(1);
    if (hash === this.written) return;
    const before = this.state;
    this.state = this.clean({ ...DEFAULTS, ...parse(hash) });
    this.written = hash;
    clearTimeout(this.timer);
    for (const listener of this.listeners) listener(this.state, before);
  }
}
