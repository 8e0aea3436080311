//! The memory plan: what the models of a machine take together. Pure.

use std::fmt;

use crate::config::Pool;
use crate::runner::PAGE_TOKENS;

/// What one model takes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelPlan {
    pub name: String,
    /// Architecture and size in words.
    pub description: String,
    pub weight_bytes: u64,
    pub page_bytes: u64,
    pub pages: u32,
    /// Most tokens of a sequence.
    pub context: u32,
}

impl ModelPlan {
    fn pool_bytes(&self) -> u64 {
        u64::from(self.pages).saturating_mul(self.page_bytes)
    }
    fn total(&self) -> u64 {
        self.weight_bytes.saturating_add(self.pool_bytes())
    }
    fn tokens(&self) -> u64 {
        u64::from(self.pages) * PAGE_TOKENS as u64
    }
}

/// Pages of a pool of this size. A pool given in bytes takes no more than a hundred sequences of the
/// full context would use.
pub fn pages(pool: Pool, page_bytes: u64, context: u32) -> Result<u32, String> {
    let useful = (u64::from(context).div_ceil(PAGE_TOKENS as u64)).saturating_mul(100);
    let pages = match pool {
        Pool::Pages(pages) => u64::from(pages),
        Pool::Tokens(tokens) => tokens.div_ceil(PAGE_TOKENS as u64),
        Pool::Bytes(bytes) => (bytes / page_bytes.max(1)).min(useful),
    };
    match u32::try_from(pages) {
        Ok(0) => Err(format!(
            "the K/V pool has no room for one page of {PAGE_TOKENS} tokens, which takes {}; raise kv_memory",
            Size(page_bytes)
        )),
        Ok(pages) => Ok(pages),
        Err(_) => Err(format!("a K/V pool of {pages} pages is larger than {}; lower it", u32::MAX)),
    }
}

/// What all models take, and what there is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryPlan {
    pub models: Vec<ModelPlan>,
    /// Memory that could be taken before anything was loaded; `None` where the system does not say.
    pub available: Option<u64>,
}

impl MemoryPlan {
    fn total(&self) -> u64 {
        self.models.iter().fold(0, |sum, model| sum.saturating_add(model.total()))
    }

    /// The models fit, or one line that says by how much they do not.
    pub fn check(&self) -> Result<(), String> {
        let Some(available) = self.available.filter(|available| *available < self.total()) else { return Ok(()) };
        let weights = self.models.iter().fold(0u64, |sum, m| sum.saturating_add(m.weight_bytes));
        let largest = self.models.iter().max_by_key(|m| m.pool_bytes());
        let remedy = match largest {
            Some(model) if weights < available => format!("lower kv_memory, most of all of `{}`", model.name),
            _ => "the weights alone do not fit; use smaller models or more memory".into(),
        };
        Err(format!(
            "the models need {} of memory (weights {}, K/V pools {}) but {} is available: {remedy}",
            Size(self.total()),
            Size(weights),
            Size(self.total() - weights),
            Size(available)
        ))
    }
}

impl fmt::Display for MemoryPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut rows = vec![["model", "", "weights", "K/V", "tokens", "context", "total"].map(String::from)];
        for model in &self.models {
            rows.push([
                model.name.clone(),
                model.description.clone(),
                Size(model.weight_bytes).to_string(),
                Size(model.pool_bytes()).to_string(),
                model.tokens().to_string(),
                model.context.to_string(),
                Size(model.total()).to_string(),
            ]);
        }
        f.write_str(&table(&rows, 2))?;
        match self.available {
            Some(available) => writeln!(f, "together {} of {} available", Size(self.total()), Size(available)),
            None => writeln!(f, "together {}", Size(self.total())),
        }
    }
}

/// Columns under each other: the first `left` to the left, the others to the right.
pub fn table<const N: usize>(rows: &[[String; N]], left: usize) -> String {
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..N).map(width).collect();
    let mut text = String::new();
    for row in rows {
        let cells = row
            .iter()
            .zip(&widths)
            .enumerate()
            .map(|(i, (cell, width))| if i < left { format!("{cell:<width$}") } else { format!("{cell:>width$}") });
        text += cells.collect::<Vec<_>>().join("  ").trim_end();
        text.push('\n');
    }
    text
}

/// Bytes for people.
pub struct Size(pub u64);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = ["KiB", "MiB", "GiB", "TiB"];
        let mut size = self.0 as f64 / 1024.0;
        let mut unit = 0;
        while size >= 1000.0 && unit + 1 < units.len() {
            size /= 1024.0;
            unit += 1;
        }
        write!(f, "{size:.1} {}", units[unit])
    }
}

/// Available memory by the texts of `/proc/meminfo` and of a control group's limit and use.
pub fn available(meminfo: &str, limit: Option<&str>, used: Option<&str>) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let machine = line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)?;
    let number = |text: Option<&str>| text.and_then(|t| t.trim().parse::<u64>().ok());
    Some(match number(limit) {
        Some(limit) => machine.min(limit.saturating_sub(number(used).unwrap_or(0))),
        None => machine,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model(name: &str, weight_bytes: u64, pages: u32) -> ModelPlan {
        let description = "qwen3, 2 layers x 160, 1.1 M".into();
        ModelPlan { name: name.into(), description, weight_bytes, page_bytes: 1 << 15, pages, context: 2048 }
    }

    #[test]
    fn sizes_of_pools() {
        assert_eq!(pages(Pool::Pages(7), 1 << 15, 2048), Ok(7));
        assert_eq!(pages(Pool::Tokens(17), 1 << 15, 2048), Ok(2));
        assert_eq!(pages(Pool::Bytes(1 << 20), 1 << 15, 2048), Ok(32));
        assert_eq!(pages(Pool::Bytes(1 << 40), 1 << 15, 2048), Ok(12800));
        assert_eq!(
            pages(Pool::Bytes(1000), 1 << 15, 2048).unwrap_err(),
            "the K/V pool has no room for one page of 16 tokens, which takes 32.0 KiB; raise kv_memory"
        );
        assert!(pages(Pool::Tokens(u64::MAX), 1, 1).unwrap_err().contains("lower it"));
    }

    #[test]
    fn the_table() {
        let plan = MemoryPlan {
            models: vec![model("small", 4 << 20, 32), model("large", 3 << 30, 6400)],
            available: Some(8 << 30),
        };
        assert_eq!(
            plan.to_string(),
            "\
model                                weights        K/V  tokens  context    total
small  qwen3, 2 layers x 160, 1.1 M  4.0 MiB    1.0 MiB     512     2048  5.0 MiB
large  qwen3, 2 layers x 160, 1.1 M  3.0 GiB  200.0 MiB  102400     2048  3.2 GiB
together 3.2 GiB of 8.0 GiB available
"
        );
        assert_eq!(plan.check(), Ok(()));
        assert!(plan.to_string().lines().all(|line| line.chars().count() <= 100));
    }

    #[test]
    fn what_does_not_fit() {
        let plan = MemoryPlan {
            models: vec![model("small", 4 << 20, 32), model("large", 3 << 30, 64000)],
            available: Some(4 << 30),
        };
        assert_eq!(
            plan.check().unwrap_err(),
            "the models need 5.0 GiB of memory (weights 3.0 GiB, K/V pools 2.0 GiB) but 4.0 GiB is available: lower kv_memory, most of all of `large`"
        );
        let plan = MemoryPlan { available: Some(1 << 30), ..plan };
        assert!(plan.check().unwrap_err().ends_with("the weights alone do not fit; use smaller models or more memory"));
        let plan = MemoryPlan { available: None, ..plan };
        assert_eq!(plan.check(), Ok(()));
    }

    #[test]
    fn available_memory() {
        let meminfo = "MemTotal:       16000000 kB\nMemAvailable:    8000000 kB\n";
        assert_eq!(available(meminfo, None, None), Some(8_192_000_000));
        assert_eq!(available(meminfo, Some("max\n"), Some("5\n")), Some(8_192_000_000));
        assert_eq!(available(meminfo, Some("1000\n"), Some("400\n")), Some(600));
        assert_eq!(available(meminfo, Some("1000"), Some("4000")), Some(0));
        assert_eq!(available("nothing", None, None), None);
    }
}
