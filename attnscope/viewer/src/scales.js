/** Numbers in few digits, and the colour scale that goes with them. */
import { make } from "./canvas.js";
import { css, sequential } from "./colours.js";

/** @param {number} value @param {number} [places] significant digits; no exponent where the value is not tiny */
export function digits(value, places = 3) {
  return value !== 0 && Math.abs(value) < 1e-4 ? value.toExponential(1) : String(Number(value.toPrecision(places)));
}

/** @param {number} low @param {number} high @param {import("./colours.js").Ramp} [ramp] @returns {HTMLElement} */
export function colourScale(low, high, ramp = sequential()) {
  const stops = Array.from({ length: 9 }, (_, place) => css(ramp, place / 8));
  const bar = make("i", { class: "gradient" });
  bar.style.backgroundImage = `linear-gradient(to right, ${stops.join(", ")})`;
  return make("span", { class: "scale" }, digits(low), bar, digits(high));
}
