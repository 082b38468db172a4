/** A slider over the queries of the chosen head, with a button to either side; where an answer begins it has a mark. */
import { make } from "./canvas.js";

/**
 * @typedef {import("./types.js").State} State
 * @typedef {import("./types.js").Page} Page
 * @typedef {import("./types.js").Store} Store
 */

export class Stepper {
  /** @param {Page} page @param {Store} store */
  constructor(page, store) {
    this.page = page;
    this.store = store;
    this.slider = make("input", {
      type: "range",
      step: 1,
      "aria-label": "Query",
      "data-role": "queries",
      oninput: () => store.set({ query: Number(this.slider.value) }),
    });
    this.back = this.#button("‹", "Query before (k)", -1);
    this.next = this.#button("›", "Next query (j)", 1);
    this.mark = make("i", { class: "made-mark", title: "here the answer begins" });
    const rail = make("span", { class: "rail" }, this.slider, this.mark);
    this.element = make("div", { class: "stepper", role: "group", "aria-label": "Step through the queries" });
    this.element.append(this.back, rail, this.next);
  }

  /** @param {string} sign @param {string} title @param {number} step */
  #button(sign, title, step) {
    const onclick = () => this.store.set({ query: this.page.query(this.store.state) + step });
    return make("button", { type: "button", class: "plain", title, "aria-label": title, onclick }, sign);
  }

  /** @param {State} state */
  render(state) {
    const side = this.page.side(state);
    const [start, stop] = side.axes(state.at, state).queries;
    const query = this.page.query(state);
    [this.slider.min, this.slider.max] = [String(start), String(stop - 1)];
    this.slider.value = String(query);
    const made = side.answer(state.at);
    const part = made === null ? "" : query >= made ? ", answer" : ", prompt";
    this.slider.setAttribute("aria-valuetext", `${side.number(query)} ${side.tokens.label[query]}${part}`);
    this.back.disabled = query <= start;
    this.next.disabled = query >= stop - 1;
    this.mark.hidden = made === null;
    if (made !== null) this.mark.style.setProperty("--share", String((made - start) / Math.max(1, stop - 1 - start)));
  }
}
