"use strict";
/* Adds sorting and copying to the page. Everything that it shows is in the HTML already. */
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
})();
