/** A head's role on this text in words, with its colour, and what an atlas names it. */
import { make } from "./canvas.js";
import { roleColour } from "./colours.js";

/** @typedef {{role: string, atlas?: string[]}} Roles */

/** @type {Roles} of a head that the page does not hold */
const NONE = { role: "-" };

/** @param {Roles} [head] @returns {HTMLElement} */
export function roleChip(head) {
  const chip = make("span", { class: "role" });
  showRole(chip, head);
  return chip;
}

/** @param {HTMLElement} chip @param {Roles} [head] */
export function showRole(chip, head = NONE) {
  chip.textContent = roleWords(head);
  chip.title = head.role === "-" ? "This text cannot show whether the head has a role" : "";
  chip.style.setProperty("--role", roleColour(head.role) ?? "");
}

/** @param {Roles} [head] @returns {string} */
export function roleWords({ role, atlas = [] } = NONE) {
  const named = atlas.length ? ` · atlas: ${atlas.join(", ")}` : "";
  return (role === "-" ? "no role" : role) + named;
}
