/** A line of tokens to pick a query or a key from; of a long text, those about the chosen one. */
import { make } from "./canvas.js";

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
    this.tokens = make("div", { class: "tokens", role: "group", "aria-label": `${axis} token` });
    this.tokens.addEventListener("click", (event) => this.#click(event));
    this.element = make("div", { class: "strip" }, make("span", { class: "name" }, axis), this.tokens);
  }

  /** @param {Side} side @param {[number, number][]} chosen half-open ranges */
  render(side, chosen) {
    const start = chosen[0][0];
    const from = Math.max(0, start - AROUND);
    const inside = this.side === side && start >= this.from && start < this.from + this.tokens.children.length;
    if (!inside || (side.count > 2 * AROUND && Math.abs(from - this.from) > AROUND / 2)) this.#build(side, from);
    for (const button of this.tokens.children) {
      const token = Number(button.getAttribute("data-token"));
      button.setAttribute("aria-pressed", String(chosen.some(([from, to]) => token >= from && token < to)));
      if (token === start) reveal(this.tokens, /** @type {HTMLElement} */ (button));
    }
  }

  /** @param {Side} side @param {number} from */
  #build(side, from) {
    this.side = side;
    this.from = side.count > 2 * AROUND ? from : 0;
    const labels = side.tokens.label.slice(this.from, this.from + 2 * AROUND + 1);
    const buttons = labels.map((label, place) => {
      const token = this.from + place;
      const what = { "data-token": token, "data-axis": this.axis, title: `${token}` };
      return make("button", { type: "button", class: "token", ...what }, label.slice(0, LONGEST) || " ");
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
