/** All heads as a grid: a row for each layer, a button for each head. The selected one is the one that Tab reaches. */
import { make, onResize, tooltip } from "./canvas.js";

/**
 * @typedef {import("./types.js").State} State
 * @typedef {import("./types.js").Page} Page
 * @typedef {import("./types.js").Side} Side
 * @typedef {import("./types.js").Store} Store
 * @typedef {{at: number, head: number}} Name
 * @typedef {{at: number, cells: HTMLElement, canvas: HTMLCanvasElement, heads: Name[]}} Row
 *
 * @typedef {object} Options
 * @property {string} label what the grid shows, for those who hear it
 * @property {number} least width of a cell in pixels: below it, a layer takes several lines
 * @property {() => number} most as many as have room, at most these
 * @property {() => number} [ratio] height / width
 * @property {number} [gap]
 * @property {(name: Name) => (string|[string, string])[]} about lines of the tooltip
 * @property {() => void} resized the cells have another size
 * @property {(name: Name) => void} [choose] what a click does instead of opening the head
 * @property {(name: Name|null) => void} [pointed] the head under the pointer, or in focus, is another one
 */

const LABEL = 40; // width of the layer's name
const PHONE = 640; // as in style.css
const LOWEST = 14; // height of a cell
const DIGIT = 6.5; // width of a digit in it

export class HeadGrid {
  /** @param {HTMLElement} parent @param {Store} store @param {Options} options */
  constructor(parent, store, options) {
    this.store = store;
    this.options = options;
    this.gap = options.gap ?? 3;
    this.width = options.least; // of a cell
    this.height = options.least;
    this.columns = 1;
    /** @type {Row[]} */
    this.rows = [];
    /** @type {Map<string, HTMLButtonElement>} */
    this.buttons = new Map();
    /** @type {Side|null} */
    this.side = null;
    this.stack = "";
    this.current = "";
    this.heading = make("div", { class: "grid-row", "aria-hidden": "true" });
    this.element = make("div", {
      class: "grid",
      role: "group",
      "aria-label": options.label,
      onclick: (/** @type {MouseEvent} */ event) => this.#click(event),
      onpointermove: (/** @type {PointerEvent} */ event) => this.#hover(event),
      onpointerleave: () => this.#leave(),
      onfocusin: (/** @type {FocusEvent} */ event) => this.#focused(event),
      onfocusout: () => this.#leave(),
    });
    parent.append(this.element);
    onResize(this.element, () => {
      this.#measure();
      options.resized();
    });
  }

  /**
   * Builds the buttons of a side's stack, where they are not there yet.
   *
   * @param {Side} side @param {number} at a layer of the stack @returns {boolean} whether they were not
   */
  show(side, at) {
    const stack = side.stackOf(at);
    if (this.side === side && this.stack === stack) return false;
    [this.side, this.stack] = [side, stack];
    this.current = "";
    this.buttons.clear();
    this.rows = side.layersWith(at).map((one) => this.#row(side, side.layers[one].layer, one));
    const rows = this.rows.map(({ at: one, cells }) =>
      make("div", { class: "grid-row" }, make("span", { class: "layer" }, `L${side.layers[one].layer}`), cells),
    );
    this.element.replaceChildren(this.heading, ...rows);
    this.#measure();
    return true;
  }

  /** @param {Side} side @param {number} layer @param {number} at @returns {Row} */
  #row(side, layer, at) {
    const heads = side.heads.filter((head) => head.at === at);
    const canvas = make("canvas", { "aria-hidden": "true", width: 1, height: 1 });
    const cells = make("div", { class: "grid-cells", role: "group", "aria-label": `layer ${layer}` }, canvas);
    for (const { head } of heads) {
      const button = make("button", {
        type: "button",
        "data-head": `${at}.${head}`,
        "aria-label": called(side, { at, head }),
        tabindex: "-1",
      });
      this.buttons.set(`${at}.${head}`, button);
      cells.append(button);
    }
    return { at, cells, canvas, heads };
  }

  #measure() {
    const { least, ratio = () => 1 } = this.options;
    const most = this.options.most();
    const label = innerWidth <= PHONE ? 30 : LABEL;
    const room = this.element.clientWidth - label;
    if (room <= 0) return;
    const heads = Math.max(1, ...this.rows.map((row) => row.heads.length));
    this.columns = Math.min(heads, Math.max(1, Math.floor((room + this.gap) / (least + this.gap))));
    const wide = Math.floor((room - this.gap * (this.columns - 1)) / this.columns);
    this.width = Math.max(4, Math.min(most, wide));
    this.height = Math.max(LOWEST, Math.round(this.width * ratio()));
    for (const { cells } of this.rows) this.#size(cells);
    this.element.classList.toggle("wrapped", this.columns < heads);
    this.#head(heads);
  }

  /** @param {HTMLElement} cells */
  #size(cells) {
    cells.style.setProperty("--columns", String(this.columns));
    cells.style.setProperty("--cell-width", `${this.width}px`);
    cells.style.setProperty("--cell-height", `${this.height}px`);
    cells.style.setProperty("--cell-gap", `${this.gap}px`);
  }

  /** @param {number} heads the numbers of heads above the columns, where a layer is one line */
  #head(heads) {
    this.heading.hidden = this.columns < heads;
    const cells = make("div", { class: "grid-cells numbers" });
    this.#size(cells);
    cells.style.setProperty("--cell-height", "14px");
    const every = Math.ceil(22 / (this.width + this.gap));
    for (let head = 0; head < heads; head++) cells.append(make("span", {}, head % every ? "" : String(head)));
    this.heading.replaceChildren(make("span", { class: "layer" }), cells);
  }

  /** @param {number} index @returns {[x: number, y: number]} where the cell is in its row's canvas */
  corner(index) {
    const line = Math.floor(index / this.columns);
    return [(index % this.columns) * (this.width + this.gap), line * (this.height + this.gap)];
  }

  /** @param {Row} row @returns {[width: number, height: number]} of its canvas */
  extent(row) {
    const lines = Math.ceil(row.heads.length / this.columns);
    return [this.columns * (this.width + this.gap), lines * (this.height + this.gap)];
  }

  /**
   * Fills one cell; its number is heard, and seen where there is room.
   *
   * @param {Name} name @param {string} colour @param {string} [text] @param {string} [ink]
   */
  fill({ at, head }, colour, text = "", ink = "") {
    const button = this.buttons.get(`${at}.${head}`);
    if (!button || !this.side) return;
    button.setAttribute("aria-label", called(this.side, { at, head }, text));
    button.style.backgroundColor = colour;
    button.style.color = ink;
    button.textContent = this.width >= DIGIT * text.length + 6 && this.height >= 16 ? text : "";
  }

  /** Marks the selected head and the further ones. @param {State} state */
  select(state) {
    const name = `${state.at}.${state.head}`;
    const also = new Set(state.heads.map(({ at, head }) => `${at}.${head}`));
    for (const [one, button] of this.buttons) {
      button.classList.toggle("also", also.has(one));
      button.tabIndex = one === name ? 0 : -1;
      if (one === name) button.setAttribute("aria-current", "true");
      else button.removeAttribute("aria-current");
    }
    const moved = this.current !== "" && this.current !== name;
    this.current = name;
    const button = this.buttons.get(name);
    if (moved && this.element.contains(document.activeElement)) button?.focus({ preventScroll: true });
    if (moved) button?.scrollIntoView({ block: "nearest", inline: "nearest" });
  }

  /** @param {Event} event @returns {Name|null} */
  #name(event) {
    const button = /** @type {Element} */ (event.target).closest("[data-head]");
    const [at, head] = button?.getAttribute("data-head")?.split(".").map(Number) ?? [];
    return button ? { at, head } : null;
  }

  /** @param {MouseEvent} event */
  #click(event) {
    const name = this.#name(event);
    if (name && this.options.choose) this.options.choose(name);
    else if (name) goTo(this.store, name, event);
  }

  #leave() {
    tooltip.hide();
    this.options.pointed?.(null);
  }

  /** @param {PointerEvent} event */
  #hover(event) {
    const name = this.#name(event);
    this.options.pointed?.(name);
    if (name) tooltip.show(event, this.options.about(name));
    else tooltip.hide();
  }

  /** @param {FocusEvent} event */
  #focused(event) {
    const name = this.#name(event);
    const button = /** @type {HTMLElement} */ (event.target);
    if (!name || !button.matches(":focus-visible")) return;
    this.options.pointed?.(name);
    const { left, bottom } = button.getBoundingClientRect();
    tooltip.show({ clientX: left, clientY: bottom }, this.options.about(name));
  }
}

/** What a cell is called for those who hear it. @param {Side} side @param {Name} name @param {string} [text] in the cell */
function called(side, { at, head }, text = "") {
  const { role = "-" } = side.headAt(at, head) ?? {};
  return [side.name(at, head), text, role === "-" ? "" : role].filter(Boolean).join(", ");
}

/**
 * Opens a head, or with Shift or Ctrl shows it beside the others.
 *
 * @param {Store} store @param {Name} name @param {MouseEvent|KeyboardEvent} event
 */
export function goTo(store, { at, head }, event) {
  tooltip.hide();
  const { state } = store;
  if (!event.shiftKey && !event.ctrlKey && !event.metaKey) return store.set({ view: "head", at, head });
  const others = state.heads.filter((one) => one.at !== at || one.head !== head);
  if (at === state.at && head === state.head) return undefined;
  return store.set({ heads: others.length < state.heads.length ? others : [...others, { at, head }] });
}
