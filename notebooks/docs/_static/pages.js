// Pictures open in full size; a button at every block of code copies its text.
addEventListener("DOMContentLoaded", () => {
  for (const picture of document.querySelectorAll(".content img:not(a img)")) {
    const link = document.createElement("a");
    link.href = picture.src;
    picture.replaceWith(link);
    link.append(picture);
  }
  for (const block of document.querySelectorAll(".highlight")) {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "copy";
    button.textContent = "Copy";
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(block.querySelector("pre").innerText);
      button.textContent = "Copied";
      setTimeout(() => { button.textContent = "Copy"; }, 1500);
    });
    block.append(button);
  }
});
