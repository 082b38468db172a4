/** A line of tokens to pick a query or a key from; of a long text, those about the chosen one. */
import { make } from "./canvas.js";
import { short } from "./views/labels.js";

/**
 * @typedef {import("./types.js").Side} Side
 * @typedef {import("./types.js").Store} Store
 */

const AROUND = 150; // tokens shown before and after the chosen one
const LONGEST = 40; // characters of a token

export class Strip {
  /** @param {"query"|"key"} axis @param {Store} store */
  constructor(axis, store) {
    this.axis = axis;
    this.store = store;
    /** @type {Side|null} */
    this.side = null;
    this.from = 0;
    /** @type {[number, number]} */
    this.all = [0, 0]; // the tokens of the axis, half-open
    this.tokens = make("div", { class: "tokens", role: "group", "aria-label": `${axis} token` });
    this.tokens.addEventListener("click", (event) => this.#click(event));
    this.element = make("div", { class: "strip" }, make("span", { class: "name" }, axis), this.tokens);
  }

  /** @param {Side} side @param {number} at the layer whose queries or keys they are @param {[number, number][]} chosen half-open ranges */
  render(side, at, chosen) {
    const axes = side.axes(at, this.store.state);
    const all = this.axis === "query" ? axes.queries : axes.keys;
    const start = chosen[0][0];
    const from = Math.max(all[0], start - AROUND);
    const same = this.side === side && this.all.join() === all.join();
    const inside = same && start >= this.from && start < this.from + this.tokens.children.length;
    const long = all[1] - all[0] > 2 * AROUND;
    if (!inside || (long && Math.abs(from - this.from) > AROUND / 2)) this.#build(side, all, long ? from : all[0]);
    for (const button of this.tokens.children) {
      const token = Number(button.getAttribute("data-token"));
      button.setAttribute("aria-pressed", String(chosen.some(([from, to]) => token >= from && token < to)));
      if (token === start) reveal(this.tokens, /** @type {HTMLElement} */ (button));
    }
  }

  /** @param {Side} side @param {[number, number]} all half-open @param {number} from */
  #build(side, all, from) {
    [this.side, this.all, this.from] = [side, all, from];
    const labels = side.tokens.label.slice(from, Math.min(all[1], from + 2 * AROUND + 1));
    const { answer } = side.data;
    const buttons = labels.map((label, place) => {
      const token = from + place;
      const what = { "data-token": token, "data-axis": this.axis, title: `${side.number(token)}` };
      const made = answer !== null && token >= answer ? (token === answer ? " made first" : " made") : "";
      return make("button", { type: "button", class: `token${made}`, ...what }, short(label, LONGEST) || " ");
    });
    this.tokens.replaceChildren(...buttons);
  }

  /** @param {MouseEvent} event with Shift, a key extends the span */
  #click(event) {
    const button = /** @type {Element} */ (event.target).closest("[data-token]");
    if (!button) return;
    const token = Number(button.getAttribute("data-token"));
    const { key } = this.store.state;
    if (this.axis === "query") this.store.set({ query: token });
    else if (event.shiftKey && key !== null)
      this.store.set({ key: Math.min(key, token), keyEnd: Math.max(key, token) + 1, group: "" });
    else this.store.set({ key: token, keyEnd: null, group: "" });
  }
}

/** Scrolls within the box alone, the item to its middle. @param {HTMLElement} box @param {HTMLElement} item */
function reveal(box, item) {
  const top = item.offsetTop - box.offsetTop;
  if (top < box.scrollTop || top + item.offsetHeight > box.scrollTop + box.clientHeight)
    box.scrollTop = top - (box.clientHeight - item.offsetHeight) / 2;
}
