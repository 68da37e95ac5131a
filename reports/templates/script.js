
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

  var most = 100;

  var columns = 12;

  function built(sample, texts, about) {
    var row = sample.cloneNode(true);
    var shown = texts.slice(0, columns).filter(function (text, at) { return about.settings || at !== 4; });
    row.setAttribute("data-status", texts[0]);
    shown.forEach(function (text, at) {
      var parts = text.split("‖");
      var cell = row.cells[at];
      cell.removeAttribute("data-value");
      if (parts.length > 2) { cell.setAttribute("data-value", parts[2]); }
      cell.textContent = parts[0];
      if (parts[1]) {
        var small = document.createElement("span");
        small.className = "sub";
        small.textContent = parts[1];
        cell.append(" ", small);
      }
    });
    if (texts.length > columns) {
      var link = document.createElement("a");
      link.href = about.before + texts[columns] + about.behind;
      link.append.apply(link, Array.prototype.slice.call(row.cells[1].childNodes));
      row.cells[1].append(link);
    }
    return row;
  }
  function rowsOf(table) {
    var rows = Array.prototype.slice.call(table.tBodies[0].rows);
    var items = rows.map(function (row) {
      return { row: row, text: row.textContent.toLowerCase(), status: row.getAttribute("data-status") };
    });
    var rest = document.getElementById("rest");
    rest.textContent.split("\n").filter(Boolean).forEach(function (line) {
      var texts = line.split("¦");
      items.push({ texts: texts, text: texts.join(" ").toLowerCase(), status: texts[0] });
    });
    items.forEach(function (item, at) { item.number = at; });
    return { items: items, row: function (item) {
      item.row = item.row || built(rows[0], item.texts, rest.dataset);
      return item.row;
    } };
  }
  function reading(row, at, kind) {
    var cell = row.cells[at];
    var own = kind === "number" && cell.firstChild ? cell.firstChild : cell;
    var text = cell.hasAttribute("data-value") ? cell.getAttribute("data-value") : own.textContent.trim();
    if (kind !== "number") { return text.toLowerCase(); }
    var number = text === "" ? NaN : Number(text.replace(/\s*%$/, ""));
    return isNaN(number) ? null : number;
  }
  function order(a, b, up) {
    if (a === null || b === null) { return (a === null) - (b === null); }
    return (a < b ? -1 : a > b ? 1 : 0) * (up ? 1 : -1);
  }
  function sorts(table, all, update) {
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
        all.items.forEach(function (item) { item.key = reading(all.row(item), at, kind); });
        all.items.sort(function (a, b) { return order(a.key, b.key, up) || a.number - b.number; });
        update();
      });
    });
  }
  function startTable(table) {
    var words = document.getElementById("filter");
    var status = document.getElementById("status");
    var shown = document.getElementById("shown");
    var all = rowsOf(table);
    function update() {
      var wanted = words.value.toLowerCase().split(/\s+/).filter(Boolean);
      var fits = all.items.filter(function (item) {
        return (!status.value || item.status === status.value) &&
          wanted.every(function (word) { return item.text.indexOf(word) >= 0; });
      });
      table.tBodies[0].replaceChildren.apply(table.tBodies[0], fits.slice(0, most).map(all.row));
      var first = fits.length > most ? ", the first " + most + " are shown" : "";
      shown.textContent = fits.length + " of " + all.items.length + " rows" + first;
    }
    sorts(table, all, update);
    words.addEventListener("input", update);
    status.addEventListener("change", update);
    update();
  }

  document.addEventListener("DOMContentLoaded", function () {
    startTheme();
    Array.prototype.forEach.call(document.querySelectorAll("table.sorts"), function (each) {
      var items = Array.prototype.map.call(each.tBodies[0].rows, function (row, at) { return { row: row, number: at }; });
      var all = { items: items, row: function (item) { return item.row; } };
      sorts(each, all, function () { items.forEach(function (item) { each.tBodies[0].append(item.row); }); });
    });
    var table = document.getElementById("cells");
    if (!table) { return; }
    Array.prototype.forEach.call(document.querySelectorAll(".js"), function (element) { element.hidden = false; });
    startTable(table);
  });
})();
