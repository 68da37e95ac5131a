
(function () {
  "use strict";
  var root = document.documentElement;
  var themes = ["auto", "light", "dark"];

  function remembered() {
    try { return localStorage.getItem("leakgauge-theme"); } catch (error) { return null; }
  }
  function remember(theme) {
    try { localStorage.setItem("leakgauge-theme", theme); } catch (error) { return; }
  }
  function apply(theme) {
    if (theme === "auto") { root.removeAttribute("data-theme"); } else { root.setAttribute("data-theme", theme); }
  }

  var requested = /theme=(auto|light|dark)/.exec(location.hash);
  var theme = requested ? requested[1] : remembered();
  if (themes.indexOf(theme) < 0) { theme = "auto"; }
  apply(theme);

  function startTheme() {
    var button = document.getElementById("theme");
    function label() { button.textContent = "Theme: " + theme; }
    button.addEventListener("click", function () {
      theme = themes[(themes.indexOf(theme) + 1) % themes.length];
      apply(theme);
      remember(theme);
      label();
    });
    label();
    button.hidden = false;
  }

  function reading(row, at, kind) {
    var cell = row.cells[at];
    var text = cell.hasAttribute("data-value") ? cell.getAttribute("data-value") : cell.textContent.trim();
    if (kind !== "number") { return text.toLowerCase(); }
    return text === "" || isNaN(Number(text)) ? null : Number(text);
  }
  function order(a, b, up) {
    if (a === null || b === null) { return (a === null) - (b === null); }
    return (a < b ? -1 : a > b ? 1 : 0) * (up ? 1 : -1);
  }
  function startSorting(table) {
    var body = table.tBodies[0];
    var heads = Array.prototype.slice.call(table.tHead.rows[0].cells);
    heads.forEach(function (head, at) {
      var kind = head.getAttribute("data-sort");
      if (!kind) { return; }
      var button = document.createElement("button");
      button.type = "button";
      button.textContent = head.textContent;
      head.textContent = "";
      head.appendChild(button);
      head.setAttribute("aria-sort", "none");
      button.addEventListener("click", function () {
        var up = head.getAttribute("aria-sort") !== "ascending";
        heads.forEach(function (other) { if (other.hasAttribute("aria-sort")) { other.setAttribute("aria-sort", "none"); } });
        head.setAttribute("aria-sort", up ? "ascending" : "descending");
        var rows = Array.prototype.map.call(body.rows, function (row, number) {
          return { row: row, key: reading(row, at, kind), number: number };
        });
        rows.sort(function (a, b) { return order(a.key, b.key, up) || a.number - b.number; });
        rows.forEach(function (entry) { body.appendChild(entry.row); });
      });
    });
  }

  function startFilter(table) {
    var words = document.getElementById("filter");
    var status = document.getElementById("status");
    var shown = document.getElementById("shown");
    var rows = Array.prototype.slice.call(table.tBodies[0].rows);
    var texts = rows.map(function (row) { return row.textContent.toLowerCase(); });
    function update() {
      var wanted = words.value.toLowerCase().split(/\s+/).filter(Boolean);
      var count = 0;
      rows.forEach(function (row, at) {
        var fits = (!status.value || row.getAttribute("data-status") === status.value) &&
          wanted.every(function (word) { return texts[at].indexOf(word) >= 0; });
        row.hidden = !fits;
        count += fits ? 1 : 0;
      });
      shown.textContent = count + " of " + rows.length + " rows";
    }
    words.addEventListener("input", update);
    status.addEventListener("change", update);
    update();
  }

  document.addEventListener("DOMContentLoaded", function () {
    startTheme();
    var table = document.getElementById("cells");
    if (!table) { return; }
    Array.prototype.forEach.call(document.querySelectorAll(".js"), function (element) { element.hidden = false; });
    startSorting(table);
    startFilter(table);
  });
})();
