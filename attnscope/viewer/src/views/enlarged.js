/** The map of the head that is pointed at in a grid, enlarged, else of the chosen one. */
import { latest, make, onResize } from "../canvas.js";
import { intensity, pixel, shading } from "../colours.js";
import { roleChip } from "../roles.js";
import { lacking, named, weightText } from "./labels.js";
import { Plot } from "./plot.js";

/**
 * @typedef {import("../types.js").State} State
 * @typedef {import("../types.js").Page} Page
 * @typedef {import("../types.js").Store} Store
 * @typedef {{at: number, head: number}} Name
 */

const NARROW = 900; // CSS pixels of a window in which the enlarged head stands above the others: as in style.css
const GUTTER = { left: 64, top: 64, right: 2, bottom: 2 };

export class Enlarged {
  /** @param {Page} page @param {Store} store */
  constructor(page, store) {
    this.page = page;
    this.state = store.state;
    /** @type {Name|null} */
    this.pointed = null;
    this.turn = latest();
    this.title = make("h2", {}, "The head enlarged"); // until it is drawn: a heading has words
    this.note = make("p", { class: "note" });
    this.value = make("p", { class: "hint" }, "Point at a head to enlarge it; a click opens it. Arrow keys choose the head shown here.");
    this.plot = new Plot(GUTTER);
    const share = () => (innerWidth > NARROW ? 1 : 0.34 * (innerHeight / this.plot.element.clientWidth)); // the heads have room below it
    this.plot.most = () => Math.min(1, share()) * this.plot.element.clientWidth;
    this.element = make("aside", { class: "enlarged", "data-role": "enlarged", "aria-label": "The head enlarged" });
    this.element.append(this.title, this.note, this.plot.element, this.value);
    this.plot.onclick = ([row, column]) => {
      const grid = this.plot.drawn?.grid;
      if (grid) store.set({ ...this.#shown(), query: grid.rowUnits.start[row], key: grid.columnUnits.start[column], keyEnd: null });
    };
    this.plot.onhover = (cell) => this.#tell(cell);
    onResize(this.element, () => void this.#draw());
  }

  /** @param {State} state */
  render(state) {
    this.state = state;
    void this.#draw();
  }

  /** @param {Name|null} name */
  point(name) {
    if (name?.at === this.pointed?.at && name?.head === this.pointed?.head) return;
    this.pointed = name;
    void this.#draw();
  }

  /** @returns {Name} */
  #shown() {
    const { at, head } = this.pointed ?? this.state;
    return { at, head };
  }

  async #draw() {
    const still = this.turn.begin();
    if (!this.element.checkVisibility()) return; // a narrow window has no room for it in every view
    const { page, state } = this;
    const { at, head } = this.#shown();
    const side = page.side(state);
    const grid = await page.filteredMap(page.shown(state), at, head, state);
    if (!still()) return;
    const max = grid?.max ?? 1;
    const { ramp, place } = shading(max, intensity(max, state.log), side.signed(at));
    this.title.replaceChildren(`${side.name(at, head)} `, roleChip(side.headAt(at, head)));
    this.note.textContent = grid ? "" : lacking(side, at, head);
    this.note.hidden = !!grid;
    this.plot.show(grid && { grid, paint: (weight) => pixel(ramp, place(weight)), chosen: null });
    this.element.dataset.head = `${at}.${head}`;
  }

  /** @param {import("./plot.js").Cell|null} cell */
  #tell(cell) {
    const grid = this.plot.drawn?.grid;
    if (!cell || !grid) return;
    const [row, column] = cell;
    const visible = (/** @type {number} */ unit) => grid.visible(row, unit);
    const look = { weights: grid.row(row), removed: 0, step: grid.step, whole: true, visible, units: grid.columnUnits };
    const [from, to] = [named(grid.rowUnits, row, 16), named(grid.columnUnits, column, 16)];
    this.value.textContent = `${from} → ${to}: ${weightText(look, column, this.state, null)}`;
  }
}
