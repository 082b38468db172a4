/** A head's role in words, with its colour. */
import { make } from "./canvas.js";
import { roleColour } from "./colours.js";

/** @param {string} role @returns {HTMLElement} */
export function roleChip(role) {
  const chip = make("span", { class: "role" });
  showRole(chip, role);
  return chip;
}

/** @param {HTMLElement} chip @param {string} role */
export function showRole(chip, role) {
  chip.textContent = role === "-" ? "no role" : role;
  chip.title = role === "-" ? "This text cannot show whether the head has a role" : "";
  chip.style.setProperty("--role", roleColour(role) ?? "");
}
