//! The memory plan: what the models of each device take together. Pure.

use std::fmt;

use super::device::Device;
use crate::config::Pool;
use crate::runner::PAGE_TOKENS;

/// K/V pool of a model on the CPU that gives no size.
pub const CPU_POOL: Pool = Pool::Bytes(512 << 20);
/// Sequences of the full context beyond which a pool that is not sized by hand does not grow.
const USEFUL_SEQUENCES: u64 = 100;

/// What one model takes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelPlan {
    pub name: String,
    /// Architecture and size in words.
    pub description: String,
    pub device: Device,
    pub weight_bytes: u64,
    /// Everything else but the K/V pool.
    pub workspace_bytes: u64,
    pub page_bytes: u64,
    pub pages: u32,
    /// Most tokens of a sequence.
    pub context: u32,
}

impl ModelPlan {
    fn fixed(&self) -> u64 {
        self.weight_bytes.saturating_add(self.workspace_bytes)
    }
    fn pool_bytes(&self) -> u64 {
        u64::from(self.pages).saturating_mul(self.page_bytes)
    }
    fn total(&self) -> u64 {
        self.fixed().saturating_add(self.pool_bytes())
    }
    fn tokens(&self) -> u64 {
        u64::from(self.pages) * PAGE_TOKENS as u64
    }
}

fn useful_pages(context: u32) -> u64 {
    u64::from(context).div_ceil(PAGE_TOKENS as u64).saturating_mul(USEFUL_SEQUENCES)
}

/// Pages of a pool of this size. A pool given in bytes takes no more than a hundred sequences of the
/// full context would use.
pub fn pages(pool: Pool, page_bytes: u64, context: u32) -> Result<u32, String> {
    let pages = match pool {
        Pool::Pages(pages) => u64::from(pages),
        Pool::Tokens(tokens) => tokens.div_ceil(PAGE_TOKENS as u64),
        Pool::Bytes(bytes) => (bytes / page_bytes.max(1)).min(useful_pages(context)),
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

/// A device and what its models may take.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DevicePlan {
    pub device: Device,
    /// What the device is called; empty for the CPU.
    pub name: String,
    /// Bytes for all its models, before anything is loaded; `None` where the system does not say.
    pub available: Option<u64>,
}

/// Why the models do not fit.
#[derive(Debug, PartialEq, Eq)]
pub struct DoesNotFit {
    pub message: String,
    /// The model, by its index, whose pool is the largest; `None` where no smaller pools would fit.
    pub lower: Option<usize>,
}

/// What all models take, and what there is. Every model's device is among the devices.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemoryPlan {
    pub models: Vec<ModelPlan>,
    pub devices: Vec<DevicePlan>,
}

impl MemoryPlan {
    fn on(&self, device: Device) -> impl Iterator<Item = &ModelPlan> {
        self.models.iter().filter(move |model| model.device == device)
    }

    fn sum(&self, device: Device, of: fn(&ModelPlan) -> u64) -> u64 {
        self.on(device).fold(0, |sum, model| sum.saturating_add(of(model)))
    }

    /// Give the pools of `open` (indices of models, whose pages do not count so far) what their devices have
    /// left: the same number of tokens to each of a device, since a routed request has its tokens at all of
    /// them. A pool gets one page at least, and [`Self::check`] tells that it does not fit.
    pub fn share_out(&mut self, open: &[usize]) {
        for &index in open {
            self.models[index].pages = 0;
        }
        let on = |plan: &Self, device| open.iter().copied().filter(|i| plan.models[*i].device == device).collect();
        for DevicePlan { device, available, .. } in self.devices.clone() {
            let open: Vec<usize> = on(self, device);
            let left = available.unwrap_or(0).saturating_sub(self.sum(device, ModelPlan::total));
            let cell = open.iter().fold(0u64, |sum, i| sum.saturating_add(self.models[*i].page_bytes));
            for index in open {
                let model = &mut self.models[index];
                let pages = (left / cell.max(1)).min(useful_pages(model.context));
                model.pages = u32::try_from(pages.max(1)).unwrap_or(u32::MAX);
            }
        }
    }

    /// The models fit, or by how much they do not.
    pub fn check(&self) -> Result<(), DoesNotFit> {
        self.devices.iter().try_for_each(|device| self.check_device(device))
    }

    fn check_device(&self, plan: &DevicePlan) -> Result<(), DoesNotFit> {
        let device = plan.device;
        let total = self.sum(device, ModelPlan::total);
        let Some(available) = plan.available.filter(|available| *available < total) else { return Ok(()) };
        let fixed = self.sum(device, ModelPlan::fixed);
        let on_device = self.models.iter().enumerate().filter(|(_, model)| model.device == device);
        let largest = on_device.max_by_key(|(_, model)| model.pool_bytes()).filter(|_| fixed < available);
        let remedy = match (largest, device) {
            (Some((_, model)), _) => format!(
                "pools of {} together would fit; lower kv_memory, kv_tokens or pages, most of all of `{}`",
                Size(available - fixed),
                model.name
            ),
            (_, Device::Cpu) => "the weights alone do not fit; use smaller models or more memory".into(),
            (_, Device::Cuda(_)) => "the weights and workspaces alone do not fit; use smaller models, lower max_rows, \
                                     spread the models over devices, end other programs there, or raise \
                                     gpu.memory_fraction"
                .into(),
        };
        let (place, workspaces) = match device {
            Device::Cpu => (String::new(), String::new()),
            Device::Cuda(_) => {
                let workspaces = Size(self.sum(device, |m| m.workspace_bytes));
                (format!(" on {device}"), format!("workspaces {workspaces}, "))
            }
        };
        let message = format!(
            "the models{place} need {} of memory (weights {}, {workspaces}K/V pools {}) but {} is available: {remedy}",
            Size(total),
            Size(self.sum(device, |m| m.weight_bytes)),
            Size(self.sum(device, ModelPlan::pool_bytes)),
            Size(available)
        );
        Err(DoesNotFit { message, lower: largest.map(|(index, _)| index) })
    }
}

impl fmt::Display for MemoryPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = ["model", "", "device", "weights", "workspace", "K/V", "tokens", "context", "total"];
        let mut rows = vec![names.map(String::from)];
        for model in &self.models {
            rows.push([
                model.name.clone(),
                model.description.clone(),
                model.device.to_string(),
                Size(model.weight_bytes).to_string(),
                Size(model.workspace_bytes).to_string(),
                Size(model.pool_bytes()).to_string(),
                model.tokens().to_string(),
                model.context.to_string(),
                Size(model.total()).to_string(),
            ]);
        }
        f.write_str(&table(&rows, 3))?;
        for DevicePlan { device, name, available } in &self.devices {
            let name = if name.is_empty() { String::new() } else { format!(" ({name})") };
            let of = available.map(|bytes| format!(" of {} available", Size(bytes))).unwrap_or_default();
            writeln!(f, "{device}{name}: {}{of}", Size(self.sum(*device, ModelPlan::total)))?;
        }
        Ok(())
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

#[cfg(test)]
mod tests {
    use super::*;

    fn model(name: &str, weight_bytes: u64, pages: u32) -> ModelPlan {
        ModelPlan {
            name: name.into(),
            description: "qwen3, 2 layers x 160, 1.1 M".into(),
            device: Device::Cpu,
            weight_bytes,
            workspace_bytes: 0,
            page_bytes: 1 << 15,
            pages,
            context: 2048,
        }
    }

    fn cpu(available: Option<u64>) -> DevicePlan {
        DevicePlan { device: Device::Cpu, name: String::new(), available }
    }

    fn h200(available: u64) -> DevicePlan {
        DevicePlan { device: Device::Cuda(0), name: "NVIDIA H200".into(), available: Some(available) }
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
        let gpu = ModelPlan { device: Device::Cuda(0), workspace_bytes: 300 << 20, ..model("large", 3 << 30, 6400) };
        let plan = MemoryPlan {
            models: vec![model("small", 4 << 20, 32), gpu],
            devices: vec![cpu(Some(8 << 30)), h200(9 << 30)],
        };
        assert_eq!(
            plan.to_string(),
            "\
model                                device  weights  workspace        K/V  tokens  context    total
small  qwen3, 2 layers x 160, 1.1 M  cpu     4.0 MiB    0.0 KiB    1.0 MiB     512     2048  5.0 MiB
large  qwen3, 2 layers x 160, 1.1 M  cuda:0  3.0 GiB  300.0 MiB  200.0 MiB  102400     2048  3.5 GiB
cpu: 5.0 MiB of 8.0 GiB available
cuda:0 (NVIDIA H200): 3.5 GiB of 9.0 GiB available
"
        );
        assert_eq!(plan.check(), Ok(()));
        assert!(plan.to_string().lines().all(|line| line.chars().count() <= 100));
    }

    #[test]
    fn what_does_not_fit() {
        let plan = MemoryPlan {
            models: vec![model("small", 4 << 20, 32), model("large", 3 << 30, 64000)],
            devices: vec![cpu(Some(4 << 30))],
        };
        assert_eq!(
            plan.check(),
            Err(DoesNotFit {
                message: "the models need 5.0 GiB of memory (weights 3.0 GiB, K/V pools 2.0 GiB) but 4.0 GiB is \
                          available: pools of 1.0 GiB together would fit; lower kv_memory, kv_tokens or pages, most \
                          of all of `large`"
                    .into(),
                lower: Some(1),
            })
        );
        let plan = MemoryPlan { devices: vec![cpu(Some(1 << 30))], ..plan };
        let DoesNotFit { message, lower } = plan.check().unwrap_err();
        assert!(message.ends_with("the weights alone do not fit; use smaller models or more memory"));
        assert_eq!(lower, None);
        let plan = MemoryPlan { devices: vec![cpu(None)], ..plan };
        assert_eq!(plan.check(), Ok(()));
    }

    #[test]
    fn devices_have_budgets_of_their_own() {
        let gpu = ModelPlan { device: Device::Cuda(0), workspace_bytes: 1 << 30, ..model("large", 3 << 30, 32000) };
        let plan = MemoryPlan {
            models: vec![model("small", 3 << 30, 32), gpu],
            devices: vec![cpu(Some(4 << 30)), h200(9 << 29)],
        };
        assert_eq!(
            plan.check().unwrap_err().message,
            "the models on cuda:0 need 5.0 GiB of memory (weights 3.0 GiB, workspaces 1.0 GiB, K/V pools 1.0 GiB) but 4.5 GiB is available: \
             pools of 512.0 MiB together would fit; lower kv_memory, kv_tokens or pages, most of all of `large`"
        );
        let plan = MemoryPlan { devices: vec![cpu(Some(4 << 30)), h200(4 << 30)], ..plan };
        assert!(plan.check().unwrap_err().message.ends_with("there, or raise gpu.memory_fraction"));
    }

    #[test]
    fn pools_share_what_is_left() {
        let on = |device, page_bytes, model: ModelPlan| ModelPlan { device, page_bytes, ..model };
        let mut plan = MemoryPlan {
            models: vec![
                on(Device::Cuda(0), 1 << 20, model("small", 1 << 30, 0)),
                on(Device::Cuda(0), 3 << 20, model("large", 2 << 30, 0)),
                on(Device::Cuda(0), 1 << 20, model("fixed", 0, 1024)),
                model("host", 1 << 30, 7),
            ],
            devices: vec![cpu(None), h200(8 << 30)],
        };
        plan.share_out(&[0, 1]);
        // 4 GiB are left, and a page at both models takes 4 MiB.
        assert_eq!(plan.models.iter().map(|m| m.pages).collect::<Vec<_>>(), [1024, 1024, 1024, 7]);
        assert_eq!(plan.check(), Ok(()));
        // Short contexts need no more than a hundred sequences.
        plan.models[0].context = 32;
        plan.share_out(&[0, 1]);
        assert_eq!((plan.models[0].pages, plan.models[1].pages), (200, 1024));
        plan.devices[1].available = Some(1 << 30);
        plan.share_out(&[0, 1]);
        assert_eq!((plan.models[0].pages, plan.models[1].pages), (1, 1));
        assert!(plan.check().is_err());
    }
}
