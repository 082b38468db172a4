/**
 * What several views say and draw alike.
 *
 * @typedef {import("../types.js").State} State
 * @typedef {import("../types.js").Store} Store
 * @typedef {import("../data.js").Look} Look
 * @typedef {import("../data.js").Side} Side
 * @typedef {import("../units.js").Units} Units
 */
import { make } from "../canvas.js";
import { css, inkOn, shading } from "../colours.js";
import { exactly, said } from "../data.js";
import { isolated, visible } from "../escaping.js";

const LONGEST = 32; // characters of a label

/** @param {string} label @param {number} [most] @returns {string} no longer than that, and in its place in a line */
export const short = (label, most = LONGEST) => isolated(cut(label, most));

/** @param {string} label @param {number} most */
function cut(label, most) {
  if (label.length <= most) return label;
  const characters = [...label.slice(0, 2 * most)];
  return characters.length <= most && label.length <= 2 * most ? label : `${characters.slice(0, most - 1).join("")}…`;
}

/** @param {Side} side @param {number} most characters @returns {string} how its text begins, in one line; its texts */
export function excerpt({ tokens: { plain, special }, origins, data }, most) {
  const pair = data.pair ?? null;
  const starts = pair === null ? origins : [0, pair];
  const texts = starts.map((start, place) => {
    const text = plain.slice(start, starts[place + 1]).filter((_, token) => !special[start + token]);
    return cut(visible(text.slice(0, most).join("").replace(/\s+/g, " ").trim()), most);
  });
  return texts.filter(Boolean).join(pair === null ? " → " : " | ");
}

/** @param {Units} units @param {number} unit @param {number} [most] @returns {string} as in `8 ·bank` */
export const named = (units, unit, most) => `${units.number(unit)} ${short(units.label[unit] ?? "", most)}`;

/** @param {Units} units @param {number|null} token @returns {number} its unit, -1 for none */
export const unitOf = (units, token) => (token === null ? -1 : (units.of[token] ?? -1));

/**
 * The weight of a unit in words: its number, or why there is none.
 *
 * @param {Look} look @param {number} unit @param {State} state
 * @param {Uint8Array|null} keep (tokens,) which keys the filters leave, where the units are keys
 */
export function weightText(look, unit, state, keep) {
  const { visible, weights, units, whole, step } = look;
  if (!visible(unit)) return "not visible";
  if (weights[unit]) return said(weights[unit], step);
  if (keep && !keep.subarray(...units.range(unit)).includes(1)) return "taken out";
  if (state.least > 0) return `<${state.least}`;
  return whole ? said(0, step) : "not among the strongest";
}

/** @param {Look} look @param {number} most @returns {number[]} units with a weight, the largest first */
export function strongest({ weights }, most) {
  const units = [];
  for (let unit = 0; unit < weights.length; unit++) if (weights[unit]) units.push(unit);
  return units.sort((a, b) => Math.abs(weights[b]) - Math.abs(weights[a])).slice(0, most);
}

/**
 * A few units with their weights as bars; a click on one chooses it.
 *
 * @param {Look} look @param {string} axis @param {(token: number) => void} choose @param {number} [most]
 */
export function ranking(look, axis, choose, most = 10) {
  const { weights, units, step } = look;
  const rows = strongest(look, most).map((unit) => {
    const bar = make("i", { class: "share" });
    bar.style.setProperty("--share", String(Math.min(1, Math.abs(weights[unit]))));
    const attributes = { type: "button", "data-token": units.start[unit], "data-axis": axis };
    const value = make("b", { title: exactly(weights[unit], step) }, said(weights[unit], step));
    const name = make("span", { class: "name" }, named(units, unit, 24));
    return make(
      "li",
      {},
      make("button", { ...attributes, onclick: () => choose(units.start[unit]) }, name, bar, value),
    );
  });
  return make("ol", { class: "ranking" }, ...rows);
}

/**
 * Buttons of which one is pressed.
 *
 * @template {keyof State} K
 * @param {Store} store @param {K} name of the state @param {[value: State[K], text: string][]} options
 */
export function choice(store, name, options) {
  const buttons = options.map(([value, text]) =>
    make(
      "button",
      {
        type: "button",
        [`data-${name}`]: String(value),
        onclick: () => store.set(/** @type {Partial<State>} */ ({ [name]: value })),
      },
      text,
    ),
  );
  return {
    element: make("div", { class: "choice", role: "group" }, ...buttons),
    /** @param {State} state */
    render(state) {
      options.forEach(([value], place) => buttons[place].setAttribute("aria-pressed", String(state[name] === value)));
    },
  };
}

/** @param {HTMLElement} element @param {number} share -1 to 1: its colour on the scale @param {boolean} signed */
export function shade(element, share, signed) {
  const { ramp, place } = shading(1, Math.abs, signed);
  element.style.backgroundColor = share ? css(ramp, place(share)) : "";
  element.style.color = share ? inkOn(ramp, place(share)) : "";
}

/** @param {Side} side @param {number} at @param {number} head @returns {string} what the page lacks of a head, or "" */
export function lacking(side, at, head) {
  const [name, held] = [side.name(at, head), side.holds(at, head)];
  if (held === "weights") return "";
  if (held === "strongest")
    return `For ${name} this page has the ${strongestKeys(side.data.relations?.k ?? 0)} of each token.`;
  const cells = held === "bins" ? "a binned map only" : "no weights";
  const select = `--select ${side.stack(at).replace(" ", ".")}${side.layers[at]?.layer}.${head}`;
  return `For ${name} this page has ${cells}: ${select} adds single tokens.`;
}

/** @param {number} k @returns {string} */
export const strongestKeys = (k) => (k === 1 ? "strongest key" : `${k} strongest keys`);

/** @param {string} kind class of the swatch @param {string} text */
export function swatch(kind, text) {
  return make("span", { class: "swatch" }, make("i", { class: kind }), text);
}
