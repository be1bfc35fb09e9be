// Images that go with the next question of a chat: chosen, dropped or pasted.

const $ = (selector) => document.querySelector(selector);

let chosen = []; // of each its name and its data URL

/** Returns the chosen images, which are then no longer chosen. */
export function take() {
  const taken = chosen;
  chosen = [];
  show();
  return taken;
}

export function start() {
  const files = $("#files");
  $("#attach").addEventListener("click", () => files.click());
  files.addEventListener("change", () => {
    add(files.files);
    files.value = "";
  });
  const composer = $("#composer");
  composer.addEventListener("dragover", (event) => {
    if (holdsFiles(event.dataTransfer)) event.preventDefault();
  });
  composer.addEventListener("drop", (event) => addFrom(event, event.dataTransfer));
  composer.addEventListener("paste", (event) => {
    // What is copied from a table is text, with an image of it.
    if (!event.clipboardData.types.includes("text/plain")) addFrom(event, event.clipboardData);
  });
}

function holdsFiles(transfer) {
  return $("#composer").dataset.mode === "chat" && transfer.types.includes("Files");
}

function addFrom(event, transfer) {
  if (!holdsFiles(transfer)) return;
  event.preventDefault();
  add(transfer.files);
}

async function add(files) {
  const images = [...files].filter(({ type }) => type.startsWith("image/"));
  chosen.push(...(await Promise.all(images.map(read))));
  show();
}

function read(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve({ name: file.name, url: reader.result });
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

function show() {
  $("#images").replaceChildren(...chosen.map(removeButton));
}

function removeButton(image) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "quiet";
  button.textContent = `${image.name} ×`;
  button.ariaLabel = `Remove ${image.name}`;
  button.addEventListener("click", () => {
    chosen = chosen.filter((other) => other !== image);
    show();
  });
  return button;
}
