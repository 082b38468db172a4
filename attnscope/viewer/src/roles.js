/** What a head is called, with its colour. Where an atlas names the heads, their role on this text is said apart. */
import { make } from "./canvas.js";
import { roleColour } from "./colours.js";

/** @typedef {{role: string, text_role: string, atlas?: string[]}} Roles */

/** @type {Roles} of a head that the page does not hold */
const NONE = { role: "-", text_role: "-" };

/** @param {Roles} [head] @returns {HTMLElement} */
export function roleChip(head) {
  const chip = make("span", { class: "role" });
  showRole(chip, head);
  return chip;
}

/** @param {HTMLElement} chip @param {Roles} [head] */
export function showRole(chip, head = NONE) {
  chip.textContent = roleWords(head);
  chip.title = source(head);
  chip.style.setProperty("--role", roleColour(head.role) ?? "");
}

/** @param {Roles} [head] @returns {string} all that an atlas names it, else its role on this text */
export function roleWords({ role, atlas = [] } = NONE) {
  return named(atlas.length ? atlas.join(", ") : role);
}

/** @param {string} role @returns {string} */
const named = (role) => (role === "-" ? "no role" : role);

/** @param {Roles} head @returns {string} who says so, and where that is an atlas, the role on this text */
function source({ text_role: role, atlas }) {
  const unseen = "this text cannot show whether the head has a role";
  if (atlas) return `by a scan of the model; ${role === "-" ? unseen : `on this text: ${role}`}`;
  return role === "-" ? unseen : "on this text";
}
