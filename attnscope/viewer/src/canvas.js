/** Canvases on screens of any density, the text that follows the pointer, and element making without HTML. */

/**
 * An element with attributes and children; strings become text, never markup.
 *
 * @template {keyof HTMLElementTagNameMap} K
 * @param {K} tag
 * @param {Record<string, string|number|boolean|null|undefined|((event: any) => void)>} [attributes] `on…`: a listener
 * @param {...(Node|string|null|undefined|false)} children
 * @returns {HTMLElementTagNameMap[K]}
 */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, String(value));
  }
  element.append(.../** @type {(Node|string)[]} */ (children.filter((child) => child || child === "")));
  return element;
}

/** Words for those who hear the page; others see what they say. @param {string} text */
export const spoken = (text) => make("span", { class: "spoken" }, text);

/**
 * Gives a canvas its size in CSS pixels and a context in which one unit is one of them.
 *
 * @param {HTMLCanvasElement} canvas
 * @param {number} width
 * @param {number} height
 * @returns {CanvasRenderingContext2D} cleared
 */
export function fit(canvas, width, height) {
  const density = Math.min(devicePixelRatio || 1, 3);
  const [wide, high] = [Math.max(1, Math.round(width * density)), Math.max(1, Math.round(height * density))];
  if (canvas.width !== wide || canvas.height !== high) [canvas.width, canvas.height] = [wide, high];
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  context.setTransform(density, 0, 0, density, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

/** @param {HTMLElement} element @param {MouseEvent} event @returns {[x: number, y: number]} in its CSS pixels */
export function place(element, event) {
  const box = element.getBoundingClientRect();
  return [event.clientX - box.left, event.clientY - box.top];
}

/** @param {HTMLElement} element @returns {number} CSS pixels from the top of the page to its own, wherever that is scrolled */
export function topOf(element) {
  let top = 0;
  for (let one = /** @type {Element|null} */ (element); one instanceof HTMLElement; one = one.offsetParent) top += one.offsetTop;
  return top;
}

/** @param {Element} element @param {() => void} change */
export function onResize(element, change) {
  let width = element.clientWidth;
  const watcher = new ResizeObserver(() => {
    const now = element.clientWidth;
    if (now === width || !now) return; // not for a height that the view sets itself, nor for a view that is hidden
    width = now;
    change();
  });
  watcher.observe(element);
}

/**
 * One picture with one pixel for each cell, to be drawn enlarged.
 *
 * @param {number} rows
 * @param {number} columns
 * @param {(row: number, column: number) => number} colour as 0xAABBGGRR, 0 for none
 * @returns {HTMLCanvasElement}
 */
export function raster(rows, columns, colour) {
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, columns);
  canvas.height = Math.max(1, rows);
  const context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  const image = context.createImageData(canvas.width, canvas.height);
  const pixels = new Uint32Array(image.data.buffer);
  for (let row = 0; row < rows; row++)
    for (let column = 0; column < columns; column++) pixels[row * columns + column] = colour(row, column);
  context.putImageData(image, 0, 0);
  return canvas;
}

let breathed = 0;

/** Lets the page answer and paint between parts of long work, about once a frame. */
export async function breathe() {
  if (performance.now() - breathed < 12) return;
  await new Promise((go) => setTimeout(go));
  breathed = performance.now();
}

/** Runs an asynchronous drawing so that only the latest one gets to draw. */
export function latest() {
  let count = 0;
  return {
    /** @returns {() => boolean} whether no later one has begun */
    begin() {
      const mine = ++count;
      return () => mine === count;
    },
  };
}

/** The one box that follows the pointer. */
class Tooltip {
  /** @type {HTMLElement|null} */
  box = null;

  /**
   * @param {{clientX: number, clientY: number}} event
   * @param {(string|[string, string])[]} lines a line, or a name and its value
   */
  show(event, lines) {
    const box = (this.box ??= make("div", { class: "tooltip", role: "tooltip", "data-role": "tooltip" }));
    if (!box.isConnected) document.body.append(box);
    box.replaceChildren(...lines.map((line) => (Array.isArray(line) ? pair(line) : make("div", {}, line))));
    box.hidden = false;
    const { offsetWidth: width, offsetHeight: height } = box;
    const left = event.clientX + 14 + width > innerWidth ? event.clientX - 14 - width : event.clientX + 14;
    const top = event.clientY + 16 + height > innerHeight ? event.clientY - 12 - height : event.clientY + 16;
    box.style.transform = `translate(${Math.max(4, left)}px, ${Math.max(4, top)}px)`;
  }

  hide() {
    if (this.box) this.box.hidden = true;
  }
}

/** @param {[string, string]} line */
function pair([name, value]) {
  return make("div", { class: "pair" }, make("span", {}, name), make("b", {}, value));
}

export const tooltip = new Tooltip();
