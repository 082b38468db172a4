/** Numbers in few digits, and the colour scale that goes with them. */
import { make } from "./canvas.js";
import { css, sequential } from "./colours.js";

/** @param {number} value @returns {string} with three digits, as weights have: `0.980`, `2.31`, `<0.001`; a whole number `1` */
export function digits(value) {
  const size = Math.abs(value);
  if (size !== 0 && size < 0.0005) return value < 0 ? ">−0.001" : "<0.001";
  if (Number.isInteger(value) || size >= 999.5) return signed(value, String(Number(size.toPrecision(3))));
  return signed(value, size < 1 ? size.toFixed(3) : size.toPrecision(3));
}

/** @param {number} value @param {number} places after the point */
export const fixed = (value, places) => signed(value, Math.abs(value).toFixed(places));

/** @param {number} value @param {string} text of its size; what is written as 0 has no sign */
const signed = (value, text) => (value < 0 && /[1-9]/.test(text) ? `−${text}` : text);

/** @param {number} bits @returns {string} a divergence as tables have it: `0.0123`, `1.2e-05`, `0` of what is equal */
export function divergence(bits) {
  if (bits === 0) return "0";
  return bits < 1e-3 ? bits.toExponential(1).replace(/-(\d)$/, "-0$1") : bits.toFixed(4);
}

/** @param {number} low @param {number} high @param {import("./colours.js").Ramp} [ramp] @returns {HTMLElement} */
export function colourScale(low, high, ramp = sequential()) {
  return make("span", { class: "scale" }, digits(low), gradient(ramp), digits(high));
}

/** @param {import("./colours.js").Ramp} ramp @returns {HTMLElement} its colours from left to right */
export function gradient(ramp) {
  const stops = Array.from({ length: 9 }, (_, place) => css(ramp, place / 8));
  const bar = make("i", { class: "gradient" });
  bar.style.backgroundImage = `linear-gradient(to right, ${stops.join(", ")})`;
  return bar;
}
