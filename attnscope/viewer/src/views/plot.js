/**
 * A map of queries x keys on a canvas: zoom, pan, crosshair, labels where there is room. The matrix view shows one, the
 * comparison three that move together; the model view enlarges one.
 *
 * @typedef {import("../data.js").Grid} Grid
 * @typedef {{x: number, y: number, k: number}} Zoom
 * @typedef {[row: number, column: number]} Cell
 * @typedef {[row: number, column: number, rowEnd?: number, columnEnd?: number]} Block cells up to these ends, else one
 *
 * @typedef {object} Drawn what is drawn
 * @property {Grid} grid
 * @property {(value: number) => number} paint 0xAABBGGRR of a value
 * @property {Block|null} chosen
 * @property {boolean} [suggested] whether nobody chose that cell
 * @property {[row: number|null, column: number|null]} [made] where the answer begins
 * @property {[row: number, column: number, row: number, column: number][]} [edges] lines between corners of cells
 * @property {((context: CanvasRenderingContext2D, plot: Plot) => void)} [over] draws more over the cells
 */
import { select } from "d3-selection";
import { zoom, zoomIdentity } from "d3-zoom";
import { fit, make, place, topOf } from "../canvas.js";
import { ink, inkOnPixel } from "../colours.js";
import { paintedBy } from "../picture.js";
import { fixed } from "../scales.js";
import { hatched, line, picture, ticks } from "./cells.js";
import { short } from "./labels.js";

const GUTTER = { left: 104, top: 92, right: 2, bottom: 2 };
const LEAST = 240; // height of a map, where the window is low
const FOOT = 12; // between the map and the line at the foot of the window
const FASTEST = 0.6; // powers of 2 that one turn of the wheel zooms by
const LARGEST = 56; // CSS pixels of a cell that is not zoomed
const DEEPEST = 64; // of a cell that is
const LEGIBLE = 11; // a row that has a label
const ROOMY = 29; // a cell that has its value in it, with two decimals
const ROOMIER = 44; // one that has three
const FONT = 11;
const LABEL = 15; // characters of a label
const EDGE = 2; // CSS pixels of the line at the edge of a window
const CLICK = 5; // a drag shorter than that is a click

export class Plot {
  /**
   * @param {{left: number, top: number, right: number, bottom: number}} [gutter] pixels of the labels
   * @param {() => number} [room] pixels that the plot may be wide; as wide as it stands without
   */
  constructor(gutter = GUTTER, room = () => this.element.clientWidth) {
    this.gutter = gutter;
    this.room = room;
    this.most = () => this.#height();
    this.base = make("canvas", {});
    this.top = make("canvas", { class: "top-canvas", role: "img", "aria-label": "queries down, keys across" });
    this.element = make("div", { class: "plot" }, this.base, this.top);
    /** @type {Drawn|null} */
    this.drawn = null;
    /** @type {Zoom} */
    this.transform = zoomIdentity;
    /** @type {Block|null} */
    this.hovered = null;
    this.cell = 1; // CSS pixels of a cell that is not zoomed
    this.size = { width: 0, height: 0 }; // of the map, in CSS pixels
    /** @type {(cell: Cell|null, event: PointerEvent) => void} */
    this.onhover = () => {};
    /** @type {(cell: Cell, event: MouseEvent) => void} */
    this.onclick = () => {};
    /** @type {(transform: Zoom) => void} */
    this.onzoom = () => {};
    paintedBy(this.base, (pen) => this.#paint(pen));
    paintedBy(this.top, (pen) => this.#over(pen));
    this.#listen();
    const foot = document.querySelector(".status"); // its words come after the map, which leaves them room
    if (foot) new ResizeObserver(() => this.draw()).observe(foot);
  }

  /** @param {Drawn|null} drawn */
  show(drawn) {
    const [before, after] = [this.drawn?.grid, drawn?.grid];
    this.drawn = drawn;
    this.element.hidden = !drawn;
    if (before?.rows !== after?.rows || before?.columns !== after?.columns) this.reset();
    this.draw();
  }

  reset() {
    this.moveTo(zoomIdentity);
  }

  /** @param {Zoom} to */
  moveTo({ x, y, k }) {
    select(this.top).call(this.zoom.transform, zoomIdentity.translate(x, y).scale(k));
  }

  /** @param {Block|null} cells */
  point(cells) {
    this.hovered = cells;
    this.#crosshair();
  }

  /**
   * @param {number} x @param {number} y in CSS pixels of the canvas
   * @returns {[row: number, column: number]} as fractions
   */
  under(x, y) {
    const { transform, cell } = this;
    return [
      ((y - transform.y) / transform.k - this.gutter.top) / cell,
      ((x - transform.x) / transform.k - this.gutter.left) / cell,
    ];
  }

  /** @param {number} row @param {number} column @returns {[x: number, y: number]} */
  at(row, column) {
    const { transform, cell } = this;
    return [
      transform.x + transform.k * (this.gutter.left + column * cell),
      transform.y + transform.k * (this.gutter.top + row * cell),
    ];
  }

  #listen() {
    /** @type {import("d3-zoom").ZoomBehavior<HTMLCanvasElement, unknown>} */
    this.zoom = zoom();
    this.zoom.clickDistance(CLICK).filter((event) => this.#zooms(event));
    this.zoom.wheelDelta(({ deltaY, deltaMode }) => {
      const turned = -deltaY * (deltaMode === 1 ? 0.5 : deltaMode ? 10 : 0.02); // ten times a wheel's, as pinches need
      return Math.max(-FASTEST, Math.min(FASTEST, turned));
    });
    this.zoom.on("zoom", ({ transform, sourceEvent }) => {
      this.transform = transform;
      this.top.classList.toggle("zoomed", transform.k > 1);
      this.draw();
      if (sourceEvent) this.onzoom(transform);
    });
    select(this.top).call(this.zoom);
    this.top.addEventListener("pointermove", (event) => {
      const cell = this.#cell(event);
      this.point(cell);
      this.onhover(cell, event);
    });
    this.top.addEventListener("pointerleave", (event) => {
      this.point(null);
      this.onhover(null, event);
    });
    this.top.addEventListener("click", (event) => {
      const cell = this.#cell(event);
      if (cell) this.onclick(cell, event);
    });
  }

  /** One finger scrolls the page while the whole map is shown, and so does the wheel without Ctrl. @param {any} event */
  #zooms(event) {
    if (event.type === "wheel") return event.ctrlKey || event.metaKey;
    if (event.button || event.ctrlKey) return false;
    return !event.touches || event.touches.length > 1 || this.transform.k > 1;
  }

  /** @param {MouseEvent} event @returns {Cell|null} */
  #cell(event) {
    const [x, y] = place(this.top, event);
    const [row, column] = this.under(x, y).map(Math.floor);
    const grid = this.drawn?.grid;
    const inside =
      grid &&
      x >= this.gutter.left &&
      y >= this.gutter.top &&
      row >= 0 &&
      column >= 0 &&
      row < grid.rows &&
      column < grid.columns;
    return inside ? [row, column] : null;
  }

  /** @returns {number} pixels from the plot to the foot of the window, as the page stands before it is scrolled */
  #height() {
    const foot = document.querySelector(".status")?.clientHeight ?? 0;
    return Math.max(LEAST, innerHeight - topOf(this.element) - foot - FOOT);
  }

  /** @param {number} factor of the zoom, about the middle of the map */
  scaleBy(factor) {
    select(this.top).call(this.zoom.scaleBy, factor);
    this.onzoom(this.transform);
  }

  draw() {
    if (!this.drawn || !this.element.clientWidth) return;
    const { grid } = this.drawn;
    const across = this.room() - this.gutter.left - this.gutter.right;
    const down = this.most() - this.gutter.top - this.gutter.bottom;
    this.cell = Math.min(LARGEST, across / grid.columns, down / grid.rows);
    this.size = { width: this.cell * grid.columns, height: this.cell * grid.rows };
    const { width, height } = this.size;
    /** @type {[[number, number], [number, number]]} */
    const map = [
      [this.gutter.left, this.gutter.top],
      [this.gutter.left + width, this.gutter.top + height],
    ];
    this.zoom
      ?.extent(map)
      .translateExtent(map)
      .scaleExtent([1, Math.max(1, DEEPEST / this.cell)]);
    const context = fit(this.base, this.gutter.left + width + this.gutter.right, this.gutter.top + height + this.gutter.bottom);
    this.#paint(context);
    this.#crosshair();
    this.top.dataset.cells = [...this.at(0, 0), this.cell * this.transform.k].join(" "); // first cell, size
  }

  /** @param {CanvasRenderingContext2D} context or what writes SVG instead */
  #paint(context) {
    this.#cells(context);
    this.#labels(context);
  }

  /** @returns {{rows: [number, number], columns: [number, number]}} the cells in sight, half-open */
  inSight() {
    const grid = /** @type {Drawn} */ (this.drawn).grid;
    const [top, left] = this.under(this.gutter.left, this.gutter.top);
    const [bottom, right] = this.under(this.gutter.left + this.size.width, this.gutter.top + this.size.height);
    return {
      rows: [Math.max(0, Math.floor(top + 1e-6)), Math.min(grid.rows, Math.ceil(bottom - 1e-6))],
      columns: [Math.max(0, Math.floor(left + 1e-6)), Math.min(grid.columns, Math.ceil(right - 1e-6))],
    };
  }

  /** @param {CanvasRenderingContext2D} context */
  #cells(context) {
    const drawn = /** @type {Drawn} */ (this.drawn);
    const { rows, columns } = this.inSight();
    const { width, height } = this.size;
    const cell = this.cell * this.transform.k;
    context.save();
    context.beginPath();
    context.rect(this.gutter.left, this.gutter.top, width, height);
    context.clip();
    context.fillStyle = hatched(context);
    context.fillRect(this.gutter.left, this.gutter.top, width, height);
    const [x, y] = this.at(rows[0], columns[0]);
    const step = Math.max(1, Math.floor(1 / (cell * Math.min(devicePixelRatio, 2)))); // cells in a pixel
    const image = picture(drawn, rows, columns, step);
    context.imageSmoothingEnabled = false;
    context.drawImage(image, x, y, image.width * step * cell, image.height * step * cell);
    if (cell >= ROOMY && drawn.grid.bin === 1) this.#numbers(context, rows, columns);
    drawn.over?.(context, this);
    this.#edges(context, rows);
    this.#made(context);
    context.restore();
    context.strokeStyle = ink("line-strong");
    context.strokeRect(this.gutter.left - 0.5, this.gutter.top - 0.5, width + 1, height + 1);
  }

  /** Lines before the first row and column of the answer. @param {CanvasRenderingContext2D} context */
  #made(context) {
    const { grid, made: [row, column] = [null, null] } = /** @type {Drawn} */ (this.drawn);
    [context.lineWidth, context.strokeStyle] = [1.5, ink("made")];
    context.setLineDash([5, 3]);
    if (row !== null) line(context, this.at(row, 0), this.at(row, grid.columns));
    if (column !== null) line(context, this.at(0, column), this.at(grid.rows, column));
    context.setLineDash([]);
    context.lineWidth = 1;
  }

  /** @param {CanvasRenderingContext2D} context @param {[number, number]} rows in sight */
  #edges(context, rows) {
    const { edges = [] } = /** @type {Drawn} */ (this.drawn);
    [context.lineWidth, context.strokeStyle] = [EDGE, ink("ink")];
    for (const [top, left, bottom, right] of edges)
      if (bottom >= rows[0] && top <= rows[1]) line(context, this.at(top, left), this.at(bottom, right));
    context.lineWidth = 1;
  }

  /** @param {CanvasRenderingContext2D} context @param {[number, number]} rows @param {[number, number]} columns */
  #numbers(context, rows, columns) {
    const { grid, paint } = /** @type {Drawn} */ (this.drawn);
    const cell = this.cell * this.transform.k;
    context.font = `${FONT}px ${ink("sans")}`;
    [context.textAlign, context.textBaseline] = ["center", "middle"];
    for (let row = rows[0]; row < rows[1]; row++)
      for (let column = columns[0]; column < columns[1]; column++) {
        if (!grid.visible(row, column)) continue;
        const [x, y] = this.at(row + 0.5, column + 0.5);
        const value = grid.at(row, column);
        context.fillStyle = inkOnPixel(paint(value));
        context.fillText(fixed(value, cell < ROOMIER ? 2 : 3), x, y, cell - 2);
      }
  }

  /** @param {CanvasRenderingContext2D} context */
  #labels(context) {
    const grid = /** @type {Drawn} */ (this.drawn).grid;
    const { rows, columns } = this.inSight();
    const cell = this.cell * this.transform.k;
    const every = cell >= LEGIBLE ? 1 : ticks((2 * LEGIBLE) / cell);
    context.font = `${FONT}px ${ink("mono")}`;
    context.fillStyle = ink("muted");
    context.textBaseline = "middle";
    /** @param {import("../units.js").Units} units @param {number} unit */
    const said = (units, unit) => {
      if (every === 1 && grid.bin === 1) return short(units.label[unit], LABEL);
      return `${units.number(unit)} ${short(units.first[unit], LABEL - 4)}`;
    };
    for (let row = Math.ceil(rows[0] / every) * every; row < rows[1]; row += every)
      this.#rowLabel(context, row, said(grid.rowUnits, row));
    for (let column = Math.ceil(columns[0] / every) * every; column < columns[1]; column += every)
      this.#columnLabel(context, column, said(grid.columnUnits, column));
    context.font = `${FONT}px ${ink("sans")}`;
    context.fillStyle = ink("faint");
    context.textAlign = "right";
    if (this.gutter.left > 80) context.fillText("query ↓   key →", this.gutter.left - 8, 8);
  }

  /** @param {CanvasRenderingContext2D} context @param {number} row @param {string} text */
  #rowLabel(context, row, text) {
    const [, y] = this.at(row + 0.5, 0);
    if (y < this.gutter.top || y > this.gutter.top + this.size.height) return;
    context.textAlign = "right";
    context.fillText(text, this.gutter.left - 7, y, this.gutter.left - 10);
  }

  /** @param {CanvasRenderingContext2D} context @param {number} column @param {string} text */
  #columnLabel(context, column, text) {
    const [x] = this.at(0, column + 0.5);
    if (x < this.gutter.left || x > this.gutter.left + this.size.width) return;
    context.save();
    context.translate(x, this.gutter.top - 7);
    context.rotate(-Math.PI / 2);
    context.textAlign = "left";
    context.fillText(text, 0, 0, this.gutter.top - 22);
    context.restore();
  }

  #crosshair() {
    const { left, right, top, bottom } = this.gutter;
    this.#over(fit(this.top, left + this.size.width + right, top + this.size.height + bottom));
  }

  /** What is chosen, and under the pointer. @param {CanvasRenderingContext2D} context */
  #over(context) {
    const { drawn, hovered } = this;
    if (!drawn) return;
    if (drawn.suggested) context.setLineDash([3, 2]);
    if (drawn.chosen) this.#mark(context, drawn.chosen, ink("accent"), 2);
    context.setLineDash([]);
    if (!hovered) return;
    this.#bands(context, hovered);
    this.#mark(context, hovered, ink("ink"), 1.5);
    const { rowUnits, columnUnits } = drawn.grid;
    context.font = `600 ${FONT}px ${ink("mono")}`;
    context.textBaseline = "middle";
    context.fillStyle = ink("query");
    const [row, column, rowEnd, columnEnd] = ends(hovered);
    const [rows, columns] = [rowUnits.label.slice(row, rowEnd), columnUnits.label.slice(column, columnEnd)];
    this.#cover(context, this.gutter.left - 3, this.at((row + rowEnd) / 2, 0)[1], rows.join(""), "query");
    this.#columnCover(context, this.at(0, (column + columnEnd) / 2)[0], columns.join(""));
  }

  /** Rows and columns, dimming nothing. @param {CanvasRenderingContext2D} context @param {Block} cells */
  #bands(context, cells) {
    const { width, height } = this.size;
    const [row, column, rowEnd, columnEnd] = ends(cells);
    const [x0, y0] = this.at(row, column);
    const [x1, y1] = this.at(rowEnd, columnEnd);
    context.save();
    context.beginPath();
    context.rect(this.gutter.left, this.gutter.top, width, height);
    context.clip();
    context.globalAlpha = 0.5;
    context.lineWidth = 1;
    context.strokeStyle = ink("query");
    line(context, [this.gutter.left, y0], [this.gutter.left + width, y0]);
    line(context, [this.gutter.left, y1], [this.gutter.left + width, y1]);
    context.strokeStyle = ink("key");
    line(context, [x0, this.gutter.top], [x0, this.gutter.top + height]);
    line(context, [x1, this.gutter.top], [x1, this.gutter.top + height]);
    context.restore();
  }

  /** @param {CanvasRenderingContext2D} context @param {Block} cells @param {string} colour @param {number} width */
  #mark(context, cells, colour, width) {
    const [row, column, rowEnd, columnEnd] = ends(cells);
    const [x, y] = this.at(row, column);
    const side = Math.max(this.cell * this.transform.k, 4);
    context.save();
    context.beginPath();
    context.rect(this.gutter.left - 2, this.gutter.top - 2, this.size.width + 4, this.size.height + 4);
    context.clip();
    context.lineWidth = width;
    context.strokeStyle = colour;
    context.strokeRect(x, y, side * (columnEnd - column), side * (rowEnd - row));
    context.restore();
  }

  /**
   * A label on paper of its own.
   *
   * @param {CanvasRenderingContext2D} context @param {number} right @param {number} y
   * @param {string} label @param {string} colour
   */
  #cover(context, right, y, label, colour) {
    const text = short(label, LABEL);
    const width = Math.min(context.measureText(text).width, this.gutter.left - 10);
    context.fillStyle = ink("paper");
    context.fillRect(0, y - FONT / 2 - 3, right, FONT + 6);
    context.fillStyle = ink(colour);
    context.textAlign = "right";
    context.fillText(text, right - 4, y, width + 1);
  }

  /** @param {CanvasRenderingContext2D} context @param {number} x @param {string} label */
  #columnCover(context, x, label) {
    context.save();
    context.translate(x, this.gutter.top - 3);
    context.rotate(-Math.PI / 2);
    context.fillStyle = ink("paper");
    context.fillRect(0, -FONT / 2 - 3, this.gutter.top - 20, FONT + 6);
    context.fillStyle = ink("key");
    context.textAlign = "left";
    context.fillText(short(label, LABEL), 4, 0, this.gutter.top - 22);
    context.restore();
  }
}

/** @param {Block} cells @returns {[row: number, column: number, rowEnd: number, columnEnd: number]} */
const ends = ([row, column, rowEnd = row + 1, columnEnd = column + 1]) => [row, column, rowEnd, columnEnd];
