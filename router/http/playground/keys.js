// The API key: asked for when the server wants one, and kept by api.js.

import * as api from "./api.js";

const $ = (selector, from = document) => from.querySelector(selector);

/** Opens the dialog that asks for the key. */
export function askForKey() {
  const dialog = $("#key-dialog");
  if (dialog.open) return;
  $("#key").value = api.key();
  dialog.showModal();
}

/** Shows on the page's button whether the server refuses the key that it has been given. */
export function showRefused(refused) {
  $("#key-button").classList.toggle("refused", refused);
}

/** @param {() => void} onKey is called when there is another key */
export function start(onKey) {
  const dialog = $("#key-dialog");
  $("#key-button").addEventListener("click", askForKey);
  dialog.addEventListener("close", () => {
    if (dialog.returnValue === "use") {
      api.setKey($("#key").value);
      onKey();
    }
    dialog.returnValue = "";
    $("#key").value = "";
  });
  $("#key-cancel").addEventListener("click", () => dialog.close());
}
