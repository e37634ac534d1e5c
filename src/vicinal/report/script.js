"use strict";
/* Adds sorting, copying, sliders and the explorer to the page. Everything that it shows is in the HTML already. */
(function () {
  document.documentElement.classList.add("scripted");

  function cellValue(row, column) {
    const cell = row.cells[column];
    return cell.dataset.value !== undefined ? Number(cell.dataset.value) : cell.textContent.trim();
  }

  /* Numbers by their value, text by the alphabet; cells without a number stay below those with one. */
  function compare(a, b, direction) {
    if (typeof a === "number" && typeof b === "number") return direction * (a - b);
    if (typeof a === "number") return -1;
    if (typeof b === "number") return 1;
    return direction * a.localeCompare(b, undefined, { numeric: true });
  }

  function sortTable(table, header) {
    const column = header.cellIndex;
    const ascending = header.getAttribute("aria-sort") !== "ascending";
    for (const each of table.tHead.rows[0].cells) each.removeAttribute("aria-sort");
    header.setAttribute("aria-sort", ascending ? "ascending" : "descending");
    const body = table.tBodies[0];
    const rows = Array.from(body.rows);
    rows.sort((a, b) => compare(cellValue(a, column), cellValue(b, column), ascending ? 1 : -1));
    rows.forEach((row) => body.appendChild(row));
  }

  for (const table of document.querySelectorAll("table.sortable")) {
    for (const header of table.tHead.rows[0].cells) {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = header.textContent;
      header.textContent = "";
      header.appendChild(button);
      button.addEventListener("click", () => sortTable(table, header));
    }
  }

  function copyText(text, status) {
    const done = () => { status.textContent = "Copied."; };
    const fallback = () => {
      const area = document.createElement("textarea");
      area.value = text;
      area.setAttribute("readonly", "");
      document.body.appendChild(area);
      area.select();
      const copied = document.execCommand("copy");
      area.remove();
      status.textContent = copied ? "Copied." : "The browser does not allow copying: open the text below.";
    };
    if (navigator.clipboard && window.isSecureContext) navigator.clipboard.writeText(text).then(done, fallback);
    else fallback();
  }

  for (const button of document.querySelectorAll("button[data-copy]")) {
    button.addEventListener("click", () => {
      const source = document.getElementById(button.dataset.copy);
      copyText(source.textContent, document.getElementById(button.dataset.status));
    });
  }

  /* Sliders: one of several pictures is shown at a time. */

  for (const block of document.querySelectorAll(".frames")) {
    const slider = block.querySelector(".frame-slider");
    if (!slider) continue;
    const frames = Array.from(block.querySelectorAll(".frame"));
    const show = () => {
      const label = frames[slider.value].dataset.label;
      frames.forEach((frame, index) => frame.classList.toggle("chosen", index === Number(slider.value)));
      block.querySelector("output").textContent = label;
      slider.setAttribute("aria-valuetext", label);
    };
    slider.addEventListener("input", show);
    show();
  }

  /* The explorer: where a patch attends, arm beside arm. */

  function bytesOf(text) {
    return Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  }

  function decodeLayer(layer) {
    if (typeof layer.levels === "string") {
      layer.levels = bytesOf(layer.levels);
      layer.maxima = bytesOf(layer.maxima);
    }
    return layer;
  }

  /* Returns the weights of a query, a number for each patch; head -1 is the mean over heads. */
  function weightsOf(layer, image, head, query) {
    const queries = layer.queryGrid[0] * layer.queryGrid[1];
    const keys = layer.grid[0] * layer.grid[1];
    const weights = new Float64Array(keys);
    const heads = head < 0 ? Array.from({ length: layer.maps }, (_, index) => index) : [head];
    for (const each of heads) {
      const map = (image * layer.maps + each) * queries + query;
      const top = (layer.maxima[2 * map] + 256 * layer.maxima[2 * map + 1]) / 65535;
      for (let key = 0; key < keys; key++) weights[key] += (layer.levels[map * keys + key] / 255) * top / heads.length;
    }
    return weights;
  }

  function drawMap(canvas, picture, layer, weights, top, row, column, palette) {
    const context = canvas.getContext("2d");
    const enlargement = Math.max(3, Math.ceil(384 / picture.naturalWidth));
    const width = (canvas.width = picture.naturalWidth * enlargement);
    const height = (canvas.height = picture.naturalHeight * enlargement);
    context.imageSmoothingEnabled = false;
    context.filter = "grayscale(1)";
    context.drawImage(picture, 0, 0, width, height);
    context.filter = "none";
    context.globalAlpha = 0.7;
    const [rows, columns] = layer.grid;
    const edge = (index, count, size) => Math.round((index * size) / count);
    weights.forEach((weight, key) => {
      const color = 3 * Math.round((254 * weight) / top);
      context.fillStyle = `rgb(${palette[color]}, ${palette[color + 1]}, ${palette[color + 2]})`;
      const y = edge(Math.floor(key / columns), rows, height);
      const x = edge(key % columns, columns, width);
      const bottom = edge(Math.floor(key / columns) + 1, rows, height);
      context.fillRect(x, y, edge((key % columns) + 1, columns, width) - x, bottom - y);
    });
    context.globalAlpha = 1;
    const [down, across] = [height / layer.queryGrid[0], width / layer.queryGrid[1]];
    for (const [color, line] of [["#ffffff", 6], ["#d55e00", 4]]) {
      context.strokeStyle = color;
      context.lineWidth = line;
      context.strokeRect(column * across + 3, row * down + 3, across - 6, down - 6);
    }
  }

  function percent(weight) {
    return `${(100 * weight).toPrecision(3)}%`;
  }

  function startExplorer(data) {
    const root = document.querySelector("#explorer .explorer");
    const [image, layer, head] = ["image", "layer", "head"].map((kind) => root.querySelector(`.explorer-${kind}`));
    const group = root.querySelector(".explorer-views");
    const views = Array.from(root.querySelectorAll(".explorer-view"));
    const palette = bytesOf(data.palette);
    const pictures = data.images.map((each) => Object.assign(new Image(), { src: each.uri }));
    const plain = root.querySelector(".explorer-picture");
    const patch = { row: 0.5, column: 0.5 };  /* parts of the image: layers can have different grids */

    const place = (part, count) => Math.min(count - 1, Math.floor(part * count));

    function layersNow() {
      const name = data.arms[0].layers[layer.value].name;
      return data.arms.map((arm) => arm.layers.find((each) => each.name === name));
    }

    function draw() {
      const picture = pictures[image.value];
      if (!picture.complete) return void (picture.onload = draw);
      plain.src = picture.src;
      const shown = layersNow().map((found) => {
        const chosen = Number(head.value) - 1;
        if (!found || chosen >= found.maps) return null;
        const [rows, columns] = found.queryGrid;
        const at = [place(patch.row, rows), place(patch.column, columns)];
        return { found: decodeLayer(found), at, weights: weightsOf(found, Number(image.value), chosen, at[0] * columns + at[1]) };
      });
      const top = Math.max(...shown.map((each) => (each ? Math.max(...each.weights) : 0))) || 1;
      root.querySelector(".explorer-top").textContent = percent(top);
      const texts = shown.map((each, index) => describe(each, index, picture, top));
      const [row, column] = shown[0].at;
      const where = `Patch in row ${row + 1}, column ${column + 1} of ${shown[0].found.queryGrid.join(" x ")}.`;
      root.querySelector(".explorer-status").textContent = `${where} ${texts.join(" ")}`;
    }

    function describe(each, index, picture, top) {
      const label = data.arms[index].label;
      const canvas = views[index].querySelector("canvas");
      const note = views[index].querySelector(".explorer-note");
      canvas.hidden = !each;
      if (!each) {
        note.textContent = "has no such layer or head";
        return `${label} has no such layer or head.`;
      }
      drawMap(canvas, picture, each.found, each.weights, top, ...each.at, palette);
      const best = each.weights.indexOf(Math.max(...each.weights));
      const columns = each.found.grid[1];
      const target = `row ${Math.floor(best / columns) + 1}, column ${(best % columns) + 1}`;
      note.textContent = `most to ${target}: ${percent(each.weights[best])}`;
      const text = `${label} attends most to ${target}, with ${percent(each.weights[best])}.`;
      canvas.setAttribute("aria-label", text);
      return text;
    }

    function point(event) {
      const box = event.currentTarget.getBoundingClientRect();
      const inside = (part) => Math.min(0.9999, Math.max(0, part));
      patch.row = inside((event.clientY - box.top) / box.height);
      patch.column = inside((event.clientX - box.left) / box.width);
      draw();
    }

    function press(event) {
      const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
      if (!move) return;
      event.preventDefault();
      const [rows, columns] = layersNow()[0].queryGrid;
      const step = (part, count, by) => (Math.min(count - 1, Math.max(0, place(part, count) + by)) + 0.5) / count;
      patch.row = step(patch.row, rows, move[0]);
      patch.column = step(patch.column, columns, move[1]);
      draw();
    }

    for (const each of [image, layer, head]) each.addEventListener("change", draw);
    for (const area of [plain, ...group.querySelectorAll("canvas")]) {
      area.addEventListener("pointermove", point);
      area.addEventListener("pointerdown", point);
    }
    group.addEventListener("keydown", press);
    draw();
  }

  const data = JSON.parse(document.getElementById("report-data").textContent);
  if (data.explorer) startExplorer(data.explorer);
})();
